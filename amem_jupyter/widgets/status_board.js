// The dashboard: puts each agent's buttons at the end of its row.

function render({ model, el }) {
  el.classList.add("amem-board");
  return panel(model, el, (picture) => {
    const rows = picture.querySelectorAll("tbody tr");
    model.get("agents").forEach(({ name, acts }, index) => {
      const cell = rows[index]?.insertCell();
      for (const act of acts) {
        const button = document.createElement("button");
        button.textContent = act;
        button.title = `${act} ${name}`;
        cell?.append(asks(model, button, { act, agent: name }));
      }
    });
  });
}

export default { render };
