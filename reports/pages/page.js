"use strict";
// Filters, sorted columns and buttons that copy: the page is complete without them.
const rows = [...document.querySelectorAll("#cases tbody tr")];
const filters = document.querySelector(".filters");
if (filters && rows.length > 1) {
  filters.hidden = false;
  const chosen = name => filters.elements[name].value;
  filters.addEventListener("input", () => {
    const text = chosen("text").toLowerCase();
    const asked = text || chosen("verdict") || chosen("mode") || chosen("ranks");
    for (const row of rows) {
      const other = ["verdict", "mode", "ranks"].some(name => chosen(name) && row.dataset[name] !== chosen(name));
      row.hidden = other || !row.dataset.text.toLowerCase().includes(text);
    }
    for (const part of document.querySelectorAll("#cases details")) {
      part.hidden = !part.querySelector("tbody tr:not([hidden])");
      if (asked && !part.hidden) part.open = true;
    }
    document.querySelector("#shown").textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} cases`;
  });
  filters.addEventListener("submit", event => event.preventDefault());
}
const number = text => parseFloat(text.replace(/[,<]/g, ""));
for (const head of document.querySelectorAll("#cases th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0], place = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => row.cells[place].dataset.value ?? row.cells[place].textContent;
    const order = (a, b) => (number(key(a)) - number(key(b))) || key(a).localeCompare(key(b), undefined, {numeric: true});
    body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * order(a, b)));
  });
}
for (const line of document.querySelectorAll(".six div")) {
  const [, command] = line.textContent.match(/^repeat:\s*(.*)$/s) || [];
  if (!command || !navigator.clipboard) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", () => navigator.clipboard.writeText(command).then(() => { button.textContent = "copied"; }));
  line.append(button);
}
