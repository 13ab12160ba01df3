// Buttons are made here and not in the HTML, so that a page without scripts has no dead ones. Cells without a number stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const key = (row, column) => row.cells[column].dataset.v;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, rows = [...body.rows];
      const numbers = rows.some(row => key(row, column) !== undefined);
      rows.sort((a, b) => {
        if (!numbers) return way * a.cells[column].textContent.localeCompare(b.cells[column].textContent, undefined, {numeric: true});
        const x = key(a, column), y = key(b, column);
        return x === undefined || y === undefined ? (x === undefined) - (y === undefined) : way * (x - y);
      });
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      body.append(...rows);
    });
  });
}
