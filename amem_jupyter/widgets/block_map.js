// The map of an agent's blocks: marks what changed since the last picture, tells about one block, and zooms.

const SCALES = [0.6, 1, 1.5, 2.25, 3.5]; // from the third on a block shows its tokens, in the last its text too
const USUAL = 1;

function render({ model, el }) {
  const last = {};
  let level = USUAL;
  let told; // the block that `detail` tells about
  el.classList.add("amem-map");

  const tools = document.createElement("div");
  tools.className = "amem-zoom";
  tools.setAttribute("role", "toolbar");
  tools.setAttribute("aria-label", "zoom");
  const detail = document.createElement("div");
  detail.className = "amem-detail";
  detail.setAttribute("aria-live", "off"); // the focused block has it as its label

  const zoom = (to) => {
    level = Math.max(0, Math.min(SCALES.length - 1, to));
    el.dataset.zoom = level;
    el.style.setProperty("--amem-zoom", SCALES[level]);
    buttons[0].disabled = level === 0;
    buttons[1].textContent = `${Math.round(SCALES[level] * 100)}%`;
    buttons[2].disabled = level === SCALES.length - 1;
  };
  const buttons = [
    ["−", "zoom out (-)", () => zoom(level - 1)],
    ["", "usual size (0)", () => zoom(USUAL)],
    ["+", "zoom in (+)", () => zoom(level + 1)],
  ].map(([text, name, act]) => {
    const button = document.createElement("button");
    button.textContent = text;
    button.title = name;
    button.setAttribute("aria-label", name);
    button.addEventListener("click", act);
    tools.append(button);
    return button;
  });
  const keys = { "+": 2, "=": 2, "-": 0, 0: 1 };
  el.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    buttons[keys[event.key]].click();
  });

  const tell = (event) => {
    const block = event.target.closest?.(".amem-block");
    if (!block) return;
    told = block.dataset.key;
    detail.textContent = block.getAttribute("aria-label");
  };
  el.addEventListener("mouseover", tell);
  el.addEventListener("focusin", tell);

  const end = panel(model, el, (picture, before) => {
    const strips = Array.from(picture.querySelectorAll(".amem-strip"));
    const titles = Array.from(before.querySelectorAll(".amem-block"), (mark) => mark.getAttribute("aria-label"));
    const rows = strips.map((strip) => Array.from(strip.querySelectorAll(".amem-block")));
    strips.forEach((strip) => strip.setAttribute("role", "group"));
    rows.flat().forEach((mark, index) => {
      const [words, text = ""] = mark.title.split("\n");
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", text ? `${words}: ${text}` : words);
      mark.dataset.key = String(index);
      mark.dataset.tokens = words.match(/\d+-\d+/)?.[0] ?? "";
      mark.dataset.text = text;
      if (titles.length && mark.getAttribute("aria-label") !== titles[index]) mark.classList.add("amem-map-changed");
    });
    roam(rows, last);
    const block = picture.querySelector(`[data-key="${told}"]`);
    if (block) detail.textContent = block.getAttribute("aria-label");
  });
  el.prepend(tools);
  el.append(detail);
  zoom(USUAL);
  return end;
}

export default { render };
