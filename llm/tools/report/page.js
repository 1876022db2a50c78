// Bokeh calls this when the charts stand, with what page.py has named: chooses the x axis and the
// runs that are shown, and shows values where the pointer is.
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const curves = (chart) => chart.renderers.filter((r) => r.tags.includes("curve") && r.visible);

function chooseAxis(x) {
  for (const drawn of charts.flatMap((chart) => chart.renderers)) drawn.glyph.x = {field: x};
  for (const range of ranges) {
    const start = range.name == "half" ? ends[x] / 2 : 0;
    const end = start + 1.02 * (ends[x] - start) || 1;
    range.setv({start, end, reset_start: start, reset_end: end});
  }
  for (const chart of charts) for (const axis of chart.below) axis.axis_label = titles[x];
}

function paint() {
  const text = {major_label_text_color: color("--faint"), axis_label_text_color: color("--faint"),
    axis_line_color: color("--faint"), major_label_text_font_size: "12px", axis_label_text_font_size: "12px"};
  for (const chart of [...charts, ...lossCharts]) {
    for (const axis of [...chart.below, ...chart.left]) {
      axis.setv(chart.left.includes(axis) ? {...text, axis_line_color: null} : text);
    }
    for (const grid of chart.center) grid.grid_line_color = color("--rule");
    for (const {glyph} of chart.renderers.filter((r) => r.tags.includes("faint"))) {
      for (const name of ["line_color", "text_color"]) if (name in glyph) glyph[name] = color("--faint");
    }
  }
  drawn.forEach((renderers, run) => {
    for (const {glyph, tags} of renderers) {
      const own = tags.includes("skip") ? color("--alarm") : color(`--run-${run % 8}`);
      for (const name of ["line_color", "fill_color", "text_color"]) if (name in glyph) glyph[name] = own;
    }
  });
}

const bubble = document.querySelector(".bubble");
let pointer = {clientX: 0, clientY: 0};
document.addEventListener("pointermove", (event) => { pointer = event; }, {capture: true});
document.addEventListener("scroll", () => { bubble.hidden = true; }, {passive: true});

function showValues(chart, place) {
  const x = document.querySelector("input[name=x]:checked").value;
  const format = (value) => Math.abs(value) >= 1e-3 || value == 0
    ? new Intl.NumberFormat("en", {maximumSignificantDigits: 5}).format(value) : value.toExponential(2);
  const lines = [];
  for (const renderer of curves(chart)) {
    const places = renderer.data_source.data[x], values = renderer.data_source.data.y;
    let nearest = 0;
    places.forEach((other, i) => { if (Math.abs(other - place) < Math.abs(places[nearest] - place)) nearest = i; });
    if (place > places.at(-1) + ends[x] / 50) continue;
    const run = drawn.findIndex((renderers) => renderers.includes(renderer));
    const line = document.createElement("p");
    line.className = `run-${run}`;
    line.innerHTML = "<i class=swatch></i><span></span><b></b>";
    line.children[1].textContent = [names.length > 1 ? names[run] : "", renderer.name].filter(Boolean).join(", ");
    line.children[2].textContent = Number.isFinite(values[nearest]) ? format(values[nearest]) : "not finite";
    lines.push(line);
  }
  const head = document.createElement("p");
  head.textContent = `${x == "seconds" ? format(place) : Math.round(place).toLocaleString("en")} ${titles[x]}`;
  bubble.replaceChildren(head, ...lines);
  bubble.hidden = !lines.length;
  const left = pointer.clientX + 16 + bubble.offsetWidth > innerWidth ? -16 - bubble.offsetWidth : 16;
  bubble.style.left = `${Math.max(8, pointer.clientX + left)}px`;
  bubble.style.top = `${Math.max(8, Math.min(pointer.clientY + 12, innerHeight - bubble.offsetHeight - 8))}px`;
}

for (const chart of charts) {
  chart.on_event("mousemove", (event) => showValues(chart, event.x));
  chart.on_event("mouseleave", () => { bubble.hidden = true; });
}
for (const radio of document.querySelectorAll("input[name=x]")) {
  radio.addEventListener("change", () => chooseAxis(radio.value));
}
drawn.forEach((renderers, run) => {
  document.getElementById(`run-${run}`)?.addEventListener("change", ({target}) => {
    for (const renderer of renderers) renderer.visible = target.checked;
  });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
paint();
chooseAxis(document.querySelector("input[name=x]:checked").value);
