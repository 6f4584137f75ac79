// What all live widgets share: a picture that changes in place, a line below it, and a document without views.

const VIEW = "application/vnd.jupyter.widget-view+json";

// A view that was saved says "model not found" once its kernel is gone. So what JupyterLab writes has our pictures in
// the place of our views; what it shows is not touched.
function keepOutOfTheDocument(model) {
  const notebook = model.widget_manager?.context?.model;
  if (typeof notebook?.toJSON !== "function") return;
  if (!notebook.amemPictures) {
    const pictures = new Map();
    const toJSON = notebook.toJSON.bind(notebook);
    const still = (output) => {
      const picture = pictures.get(output.data?.[VIEW]?.model_id);
      return picture ? { ...output, data: picture() } : output;
    };
    notebook.amemPictures = pictures;
    notebook.toJSON = () => {
      const json = toJSON();
      const cells = json.cells.map((cell) => (cell.outputs ? { ...cell, outputs: cell.outputs.map(still) } : cell));
      return { ...json, cells };
    };
  }
  notebook.amemPictures.set(model.get("view_id"), () => ({
    "text/html": model.get("picture"),
    "text/plain": model.get("text"),
  }));
}

// Fills `el`; calls `dress` with the element of the picture whenever it was drawn anew. Returns what takes it down.
function panel(model, el, dress) {
  const picture = document.createElement("div");
  const doing = document.createElement("div");
  el.classList.add("amem-panel");
  doing.className = "amem-doing";
  el.append(picture, doing);

  const draw = () => {
    const open = picture.querySelector("details")?.open ?? false;
    const before = picture.cloneNode(true);
    picture.innerHTML = model.get("picture");
    const details = picture.querySelector("details");
    if (details) details.open = open;
    dress(picture, before);
  };
  const say = () => {
    doing.textContent = model.get("doing");
  };

  keepOutOfTheDocument(model);
  model.on("change:picture", draw);
  model.on("change:doing", say);
  draw();
  say();
  return () => {
    model.off("change:picture", draw);
    model.off("change:doing", say);
  };
}

// A button or a clickable text that sends a message to the kernel.
function asks(model, element, message) {
  element.tabIndex = 0;
  const send = () => model.send(message);
  element.addEventListener("click", send);
  element.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && element.tagName !== "BUTTON") send();
  });
  return element;
}
