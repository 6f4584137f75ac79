// The map of an agent's blocks: marks what changed since the last picture.

function render({ model, el }) {
  el.classList.add("amem-map");
  const marks = (picture) => Array.from(picture.querySelectorAll("span[title]"));
  return panel(model, el, (picture, before) => {
    const titles = marks(before).map((mark) => mark.title);
    marks(picture).forEach((mark, index) => {
      if (titles.length && mark.title !== titles[index]) mark.classList.add("amem-map-changed");
    });
  });
}

export default { render };
