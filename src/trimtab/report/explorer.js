const explorer = JSON.parse(document.getElementById("explorer-data").textContent);
const part = (id) => document.getElementById(id);
const chosen = { model: part("choose-model"), data: part("choose-data"), metric: part("choose-metric") };
const focus = part("choose-focus"), showPublished = part("show-published");
const unique = (values) => [...new Set(values)];

// Options change with what was chosen before; a choice that still exists is kept.
function offer(select, values, otherwise) {
  const before = select.value;
  select.replaceChildren(...values.map((value) => new Option(value, value)));
  select.value = values.includes(before) ? before : otherwise ?? values[0];
  return select.value;
}

function signed(value, digits) {
  const text = Math.abs(value).toFixed(digits);
  return (Number(text) === 0 ? "" : value < 0 ? "−" : "+") + text;
}

function range(row, format) {
  return row.low === null ? "n/a" : "[" + format(row.low, row.digits) + ", " + format(row.high, row.digits) + "]";
}

function update() {
  let rows = explorer.rows.filter((row) => !row.published || (showPublished && showPublished.checked));
  for (const key of ["model", "data", "metric"]) {
    const value = offer(chosen[key], unique(rows.map((row) => row[key])));
    rows = rows.filter((row) => row[key] === value);
  }
  const best = rows.reduce((a, b) => (b.value > a.value ? b : a));
  const name = offer(focus, rows.map((row) => row.label), best.label);
  const own = rows.find((row) => row.label === name);
  const digits = own.digits;
  const plain = (value) => value.toFixed(digits);
  const kind = (row) => (row.label === name ? "focus" : row.published ? "published" : "other");

  const bars = rows.map((row) => ({ ...row, kind: kind(row), text: plain(row.value), end: row.high === null ? row.value : Math.max(row.value, row.high) }));
  const others = own.differences
    .map((found) => ({ ...found, row: rows.find((row) => row.label === found.label) }))
    .filter((found) => found.row)
    .map(({ row, ...found }) => ({
      ...found, digits, kind: kind(row), text: signed(found.value, digits), end: Math.max(found.value, found.high ?? found.value),
    }));

  const title = chosen.data.value + ": " + chosen.metric.value;
  part("bars-title").replaceChildren(title + " ", note(own.unit));
  part("differences-title").replaceChildren(name + " minus the others ", note(own.unit === "percent" ? "percentage points" : own.unit));
  part("differences-figure").hidden = others.length === 0;
  draw("bars", explorer.bars, bars);
  if (others.length) draw("differences", explorer.differences, others);

  part("value-column").textContent = chosen.metric.value;
  part("difference-column").textContent = name + " minus it";
  part("explorer-rows").replaceChildren(...rows.map((row) => {
    const found = others.find((other) => other.label === row.label);
    const difference = found ? [found.text, range(found, signed), found.how] : ["–", "–", ""];
    return line([row.label, plain(row.value), range(row, (value) => plain(value)), ...difference], row.how);
  }));
}

function note(text) {
  const small = document.createElement("small");
  small.textContent = text;
  return small;
}

function line(cells, how) {
  const row = document.createElement("tr");
  cells.forEach((text, place) => {
    const cell = document.createElement(place ? "td" : "th");
    if (!place) cell.scope = "row";
    else if (place < cells.length - 1) cell.className = "number";
    cell.textContent = text;
    if (!place && how) cell.append(note(how));
    if (place && place === cells.length - 1) cell.className = "wide";
    row.append(cell);
  });
  return row;
}

function draw(id, specification, rows) {
  part(id).setAttribute("role", "img");
  part(id).setAttribute("aria-label", part(id + "-title").textContent + ": the numbers are in the table below");
  drawChart(part(id), { ...specification, height: 32 * rows.length, datasets: { rows } });
}

for (const select of [...Object.values(chosen), focus, showPublished]) if (select) select.addEventListener("change", update);
update();
