// The tree of an agent's turns: each is a place to stand on.

function render({ model, el }) {
  el.classList.add("amem-tree");
  return panel(model, el, (picture) => {
    for (const line of picture.querySelectorAll("span[title^='turn ']")) {
      const turn = parseInt(line.title.slice("turn ".length), 10);
      asks(model, line, { act: "checkout", turn });
    }
  });
}

export default { render };
