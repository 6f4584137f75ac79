// The dashboard: puts each agent's buttons at the end of its row.

// Buttons that take each other's place keep the focus.
const PLACE = { restore: "evict", unpin: "pin" };

function render({ model, el }) {
  el.classList.add("amem-board");
  return panel(model, el, (picture) => {
    const rows = picture.querySelectorAll("tbody tr");
    const head = document.createElement("th");
    head.scope = "col";
    head.setAttribute("aria-label", "what can be done");
    head.setAttribute("style", picture.querySelector("thead th")?.getAttribute("style") ?? "");
    picture.querySelector("thead tr")?.append(head);
    model.get("agents").forEach(({ name, acts }, index) => {
      const cell = rows[index]?.insertCell();
      cell?.setAttribute("style", rows[index].cells[0].getAttribute("style"));
      for (const act of acts) {
        const button = document.createElement("button");
        button.textContent = act;
        button.title = `${act} ${name}`;
        button.setAttribute("aria-label", button.title);
        cell?.append(asks(model, button, `${PLACE[act] ?? act} ${name}`, { act, agent: name }));
      }
    });
  });
}

export default { render };
