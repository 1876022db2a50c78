// Shows values where the pointer is, and the same place in every chart. The rest needs no script.
"use strict";
(() => {
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const figures = [...document.querySelectorAll("figure[data-panel]")];
  const bubble = document.createElement("div");
  bubble.className = "bubble";
  bubble.hidden = true;
  document.body.append(bubble);
  const chosenAxis = () => document.querySelector("input[name=x]:checked").value;
  const isShown = (run) => document.getElementById(`run-${run}`)?.checked ?? true;
  const format = (value, digits) =>
    value !== 0 && Math.abs(value) < 1e-3
      ? value.toExponential(2)
      : new Intl.NumberFormat("en", { maximumSignificantDigits: digits }).format(value);

  // Index of the point that is nearest to a place, by bisection.
  function nearest(places, place) {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] < place) low = middle;
      else high = middle;
    }
    return place - places[low] <= places[high] - place ? low : high;
  }

  function line(run, name, value) {
    const row = document.createElement("p");
    row.className = `run-${run}`;
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    const text = document.createElement("span");
    const shown = numbers.runs.length > 1 ? [numbers.runs[run], name] : [name];
    text.textContent = shown.filter(Boolean).join(", ");
    const number = document.createElement("b");
    number.textContent = value;
    row.append(swatch, text, number);
    return row;
  }

  function show(figure, event) {
    const x = chosenAxis();
    const panel = numbers.panels[figure.dataset.panel];
    const box = figure.querySelector(".plot").getBoundingClientRect();
    const [low, high, divisor, title] = panel.x[x];
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const place = low + share * (high - low);
    const head = document.createElement("p");
    head.textContent = x === "seconds"
      ? `${format(place / divisor, 4)} ${title}`
      : `${Math.round(place).toLocaleString("en")} ${title}`;
    const lines = panel.curves
      .filter((curve) => isShown(curve.run))
      .map((curve) => {
        const value = curve.ys[nearest(curve.xs[x], place)];
        const beyond = place > curve.xs[x].at(-1) + (high - low) / 50;
        if (beyond || value === undefined) return null;
        return line(curve.run, curve.name, value === null ? "not finite" : format(value, 5));
      })
      .filter(Boolean);
    bubble.replaceChildren(head, ...lines);
    bubble.hidden = false;
    const left = event.clientX + 16 + bubble.offsetWidth > innerWidth
      ? event.clientX - 16 - bubble.offsetWidth : event.clientX + 16;
    bubble.style.left = `${Math.max(8, left)}px`;
    bubble.style.top = `${Math.max(8, Math.min(event.clientY + 12, innerHeight - bubble.offsetHeight - 8))}px`;
    for (const other of figures) {
      const [from, to] = numbers.panels[other.dataset.panel].x[x];
      const cursor = other.querySelector(".cursor");
      const at = (place - from) / (to - from);
      cursor.hidden = at < 0 || at > 1;
      cursor.style.left = `${100 * at}%`;
    }
  }

  function hide() {
    bubble.hidden = true;
    for (const figure of figures) figure.querySelector(".cursor").hidden = true;
  }

  for (const figure of figures) {
    const plot = figure.querySelector(".plot");
    for (const kind of ["pointermove", "pointerdown"]) {
      plot.addEventListener(kind, (event) => show(figure, event));
    }
    plot.addEventListener("pointerleave", hide);
  }
  addEventListener("scroll", hide, { passive: true });
})();
