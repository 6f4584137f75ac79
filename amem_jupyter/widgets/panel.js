// What all live widgets share: a picture that changes in place, a line below it, and a document without views.

const VIEW = "application/vnd.jupyter.widget-view+json";

const ENDED = new Set(["restarting", "autorestarting", "terminating", "dead"]); // of a kernel

// A view that was saved says "model not found" once its kernel is gone. So what JupyterLab writes has our pictures in
// the place of our views, and what it shows has them there as soon as the kernel ends.
function keepOutOfTheDocument(model) {
  const context = model.widget_manager?.context;
  const notebook = context?.model;
  if (typeof notebook?.toJSON !== "function") return;
  if (!notebook.amemPictures) {
    const pictures = new Map();
    const toJSON = notebook.toJSON.bind(notebook);
    const still = (output) => {
      const picture = pictures.get(output.data?.[VIEW]?.model_id);
      return picture ? { ...output, data: picture() } : output;
    };
    const end = () => {
      for (const { outputs } of notebook.cells) {
        for (let at = 0; at < (outputs?.length ?? 0); at++) {
          const shown = outputs.get(at).toJSON();
          const kept = still(shown);
          if (kept !== shown) outputs.set(at, kept);
        }
      }
      pictures.clear();
    };
    notebook.amemPictures = pictures;
    notebook.toJSON = () => {
      const json = toJSON();
      const cells = json.cells.map((cell) => (cell.outputs ? { ...cell, outputs: cell.outputs.map(still) } : cell));
      return { ...json, cells };
    };
    context.sessionContext.statusChanged.connect((_context, status) => ENDED.has(status) && end());
    context.sessionContext.kernelChanged.connect(end);
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
  el.setAttribute("role", "group");
  el.dataset.lmSuppressShortcuts = ""; // while the focus is in here, keys are not the notebook's
  doing.className = "amem-doing";
  doing.setAttribute("role", "status");
  doing.setAttribute("aria-live", "off"); // steps of a request come too fast to be read out; answers to a click do not
  el.append(picture, doing);

  const draw = () => {
    const open = picture.querySelector("details")?.open ?? false;
    const held = picture.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    const before = picture.cloneNode(true);
    picture.innerHTML = model.get("picture");
    el.setAttribute("aria-label", model.get("text").split("\n", 1)[0]);
    const details = picture.querySelector("details");
    if (details) details.open = open;
    dress(picture, before);
    if (held !== undefined) picture.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
  };
  const say = () => {
    doing.textContent = model.get("doing");
    doing.setAttribute("aria-live", el.dataset.asked ? "polite" : "off");
  };
  const changes = { "change:picture": draw, "change:doing": say };

  keepOutOfTheDocument(model);
  for (const [name, act] of Object.entries(changes)) model.on(name, act);
  draw();
  say();
  return () => {
    for (const [name, act] of Object.entries(changes)) model.off(name, act);
  };
}

// An element that sends a message to the kernel: clicked, or with Enter or the space bar.
function asks(model, element, key, message) {
  const send = () => {
    element.closest(".amem-panel").dataset.asked = "yes";
    model.send(message);
  };
  element.dataset.key = key;
  element.addEventListener("click", send);
  element.addEventListener("keydown", (event) => {
    if (element.tagName === "BUTTON" || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    send();
  });
  return element;
}

// Rows of elements between which the arrow keys, Home and End move; the tab key stops at one of them, the last that had
// the focus. `last` is its key, kept from one picture to the next.
function roam(rows, last) {
  const all = rows.flat();
  const stop = (element) => {
    for (const other of all) other.tabIndex = other === element ? 0 : -1;
    last.key = element?.dataset.key;
  };
  stop(all.find((element) => element.dataset.key === last.key) ?? all[0]);
  rows.forEach((row, y) => {
    row.forEach((element, x) => {
      element.addEventListener("focus", () => stop(element));
      element.addEventListener("keydown", (event) => {
        const beside = (other) => other?.[Math.min(x, other.length - 1)];
        const next = {
          ArrowLeft: row[x - 1],
          ArrowRight: row[x + 1],
          ArrowUp: beside(rows[y - 1]),
          ArrowDown: beside(rows[y + 1]),
          Home: row[0],
          End: row[row.length - 1],
        };
        if (!(event.key in next)) return;
        event.preventDefault();
        next[event.key]?.focus();
      });
    });
  });
}
