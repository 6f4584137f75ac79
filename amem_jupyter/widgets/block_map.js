// Draws the map's picture, and marks what changed since the last one.

function render({ model, el }) {
  const picture = document.createElement("div");
  const doing = document.createElement("div");
  el.classList.add("amem-map");
  doing.className = "amem-map-doing";
  el.append(picture, doing);

  const marks = () => Array.from(picture.querySelectorAll("span[title]"));

  const draw = () => {
    const before = marks().map((mark) => mark.title);
    const open = picture.querySelector("details")?.open ?? false;
    picture.innerHTML = model.get("picture");
    const details = picture.querySelector("details");
    if (details) details.open = open;
    marks().forEach((mark, index) => {
      if (before.length && mark.title !== before[index]) mark.classList.add("amem-map-changed");
    });
  };
  const say = () => {
    doing.textContent = model.get("doing");
  };

  model.on("change:picture", draw);
  model.on("change:doing", say);
  draw();
  say();
  return () => {
    model.off("change:picture", draw);
    model.off("change:doing", say);
  };
}

export default { render };
