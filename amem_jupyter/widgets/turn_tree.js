// The tree of an agent's turns: each is a place to stand on.

function render({ model, el }) {
  const last = {};
  el.classList.add("amem-tree");
  return panel(model, el, (picture) => {
    const turns = Array.from(picture.querySelectorAll(".amem-turn"));
    for (const line of turns) {
      const turn = parseInt(line.title.slice("turn ".length), 10);
      line.setAttribute("role", "button");
      line.setAttribute("aria-current", line.textContent.includes("← here"));
      asks(model, line, `turn ${turn}`, { act: "checkout", turn });
    }
    roam(
      turns.map((line) => [line]),
      last,
    );
  });
}

export default { render };
