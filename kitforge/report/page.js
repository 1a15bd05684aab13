// Draws the curves from the numbers in the page, with a cross-hair and read-outs, and adds switches for the runs. All
// text and tables of the page are there without it.
"use strict";
const WIDTH = 2000, HEIGHT = 1000, LARGEST = 1e300, SMALLEST = 1e-280;
const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
const held = (value) => {
  const inside = Math.min(Math.max(value, -LARGEST), LARGEST);
  return Math.abs(inside) < SMALLEST ? 0 : inside;
};

// Four significant digits: 3.214, 12,345, 0.0003, 1.5e-5; from a million on 1.23 M.
function number(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(3).replace("+", "");
  for (const [unit, letter] of UNITS.slice(0, 3)) {
    // A hair below the unit would be rounded up to "1000".
    if (size >= unit * 0.9995) return `${Number((value / unit).toPrecision(3))}\u00a0${letter}`;
  }
  if (size >= 1e3) return Math.round(value).toLocaleString("en");
  if (size && size < 1e-4) return Number(value.toPrecision(4)).toExponential();
  return String(Number(value.toPrecision(4)));
}

// An axis from `low` to `high`, which differ; a logarithmic one has `low` > 0. Values outside are drawn at its ends.
function scaleOf(low, high, isLog = false) {
  const bend = isLog ? Math.log : (value) => value;
  const reach = bend(high) - bend(low);
  return { low, high, isLog, position: (value) => (bend(Math.min(Math.max(value, low), high)) - bend(low)) / reach };
}

// Sizes that span more than a power of ten stand on a logarithmic axis.
function stepScale({ low, high, isSize }) {
  return high > low ? scaleOf(low, high, isSize && low > 0 && 10 * low < high) : scaleOf(low - 0.5, high + 0.5);
}

function valueScale(values, mayBeLog) {
  const low = held(values.reduce((a, b) => Math.min(a, b), values[0] ?? 0));
  const high = held(values.reduce((a, b) => Math.max(a, b), values[0] ?? 1));
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (mayBeLog && low > 0 && high / 20 > low) {
    const air = Math.min((high / low) ** 0.04, 10);
    return scaleOf(low / air, high * air, true);
  }
  if (high - low <= 1e-9 * size) {
    const reach = size || 1;
    return scaleOf(low > 0 ? 0 : low - reach / 2, high + reach / 4);
  }
  const air = (high - low) * 0.05;
  // The axis begins at zero if the values come near it.
  return scaleOf(low >= 0 && low < high * 0.4 ? 0 : low - air, high + air);
}

const range = (first, last, stride = 1) =>
  Array.from({ length: Math.max(0, Math.floor((last - first) / stride) + 1) }, (_, index) => first + index * stride);

// About `most` round values on the axis, in rising order.
function ticksOf({ low, high, isLog }, most) {
  if (isLog) {
    const first = Math.floor(Math.log10(low)), last = Math.floor(Math.log10(high));
    const powers = range(first, last, Math.max(1, Math.ceil((last - first) / most)));
    const ticks = powers.flatMap((power) => (last - first <= 2 ? [1, 2, 5] : [1]).map((factor) => factor * 10 ** power));
    return ticks.filter((tick) => low <= tick && tick <= high);
  }
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const spacing = power * ([1, 2, 5].find((factor) => power * factor >= rough * 0.85) ?? 10);
  return range(Math.ceil(low / spacing - 1e-9), Math.floor(high / spacing + 1e-9)).map((index) => index * spacing);
}

// Labels of evenly spaced ticks have the same letter and as many decimals as their spacing needs.
function evenLabels(ticks) {
  const largest = Math.max(...ticks.map(Math.abs)), exponent = Math.floor(Math.log10(largest) + 1e-9);
  const letter = UNITS.find(([size]) => largest >= size * 10) ?? [1, ""];
  const [unit, suffix] = (largest > 0 && largest < 1e-2) || largest >= 1e15 ? [10 ** exponent, `e${exponent}`] : letter;
  const spacing = (ticks.length > 1 ? ticks[1] - ticks[0] : largest) / unit;
  const decimals = spacing > 0 ? Math.min(20, Math.max(0, -Math.floor(Math.log10(spacing) + 1e-9))) : 0;
  return ticks.map((tick) => (tick ? (tick / unit).toFixed(decimals) + suffix : "0"));
}

function labels(box, scale, side, ticks) {
  const texts = scale.isLog ? ticks.map(number) : evenLabels(ticks);
  for (const [index, tick] of ticks.entries()) {
    const label = document.createElement("span");
    label.textContent = texts[index];
    label.style[side] = `${scale.position(tick) * 100}%`;
    box.append(label);
  }
}

// A part of a drawing; `title` is what a pointer at rest is told.
function draw(parent, name, attributes, title) {
  const made = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (title) draw(made, "title", {}).textContent = title;
  parent.append(made);
  return made;
}

// The line ends at a value that is not finite, and where the run went back. A single point is a stroke of zero length,
// which round caps draw as a dot.
function pathOf(points, x, y, field) {
  let path = "", length = 0, before = -Infinity;
  const close = () => (length === 1 ? "h0" : "");
  for (const point of points) {
    const [step, value] = [point[0], point[field]];
    if (point[1] === null || step < before) [path, length] = [path + close(), 0];
    before = step;
    if (value === null || value === undefined) continue;
    path += `${length ? " " : "M"}${x(step)} ${y(value)}`;
    length += 1;
  }
  return path + close();
}

function drawLine(svg, { label, run, tone, isEvaluation, hasTrend, points }, x, y) {
  const group = draw(svg, "g", { class: tone, "data-run": run });
  const raw = pathOf(points, x, y, 1);
  if (isEvaluation) {
    const dots = points.filter(([, value]) => value !== null).map(([step, value]) => `M${x(step)} ${y(value)}h0`).join("");
    for (const [kind, d] of [["raw", raw], ["halo", dots], ["dots", dots]]) draw(group, "path", { class: kind, d });
  } else {
    if (hasTrend) draw(group, "path", { class: "raw", d: raw });
    draw(group, "path", { class: "trend", d: hasTrend ? pathOf(points, x, y, 2) : raw });
  }
  const gaps = points.filter(([, value]) => value === null).map(([step]) => `M${x(step)} 0v40`).join("");
  if (gaps) draw(group, "path", { class: "gap", d: gaps }, "not finite");
}

// The curve in words, for screen readers.
function sentence({ label, points }, axis) {
  const finite = points.filter(([, value]) => value !== null);
  if (!finite.length) return `${label}: no finite value.`;
  const at = ([step, value]) => `${number(value)} at ${axis} ${step.toLocaleString("en")}`;
  const most = (sign) => finite.reduce((best, point) => (sign * point[1] > sign * best[1] ? point : best));
  return `${label}: from ${at(finite[0])} to ${at(finite.at(-1))}, lowest ${at(most(-1))}, highest ${at(most(1))}.`;
}

const plots = [...document.querySelectorAll(".chart")].map((chart) => {
  const data = JSON.parse(chart.dataset.chart), { axis } = chart.dataset, svg = chart.querySelector(".area > svg");
  const steps = stepScale(data);
  const found = data.lines.flatMap(({ points }) => points.map(([, value]) => value)).filter((value) => value !== null);
  const scale = valueScale(found, data.mayBeLog), rows = ticksOf(scale, 5);
  const x = (step) => Math.round(steps.position(step) * WIDTH), y = (value) => Math.round((1 - scale.position(value)) * HEIGHT);
  if (scale.isLog) {
    const note = chart.querySelector("h3 small") ?? chart.querySelector("h3").appendChild(document.createElement("small"));
    note.textContent = note.textContent ? `${note.textContent}, logarithmic` : " logarithmic";
  }
  draw(svg, "desc", {}).textContent = data.lines.map((line) => sentence(line, axis)).join(" ");
  draw(svg, "path", { class: "grid", d: rows.map((tick) => `M0 ${y(tick)}h${WIDTH}`).join("") });
  for (const [step, label, isBad] of data.marks) {
    draw(svg, "path", { class: isBad ? "mark bad" : "mark", d: `M${x(step)} 0v${HEIGHT}` }, label);
  }
  for (const line of data.lines) drawLine(svg, line, x, y);
  labels(chart.querySelector(".y"), scale, "bottom", rows);
  // Steps are whole numbers; a short run would otherwise get ticks at halves.
  const columns = ticksOf(steps, 6).filter((tick) => Number.isInteger(tick) && steps.low <= tick && tick <= steps.high);
  labels(chart.querySelector(".x"), steps, "left", columns);
  const readouts = [...chart.querySelectorAll(".legend li b")];
  const curves = data.lines.map(({ points }, place) => {
    return { readout: readouts[place], last: readouts[place].textContent, points };
  });
  return { ...steps, axis, curves, area: chart.querySelector(".area"), cursor: chart.querySelector(".cursor") };
});

// Steps go back where a run did, so the nearest point is looked for among all of them; the later one wins.
const nearest = (points, step) =>
  points.reduce((best, point) => (Math.abs(point[0] - step) <= Math.abs(best[0] - step) ? point : best));

function show(share) {
  for (const { low, high, isLog, axis, curves, cursor } of plots) {
    const step = isLog ? low * (high / low) ** share : low + share * (high - low);
    cursor.hidden = false;
    cursor.style.left = `${share * 100}%`;
    cursor.dataset.step = Math.round(step).toLocaleString("en") + (axis === "step" ? "" : ` ${axis}`);
    cursor.classList.toggle("late", share > 0.5);
    for (const { points, readout } of curves) readout.textContent = number(nearest(points, step)[1]);
  }
}

function clear() {
  for (const { curves, cursor } of plots) {
    cursor.hidden = true;
    for (const { readout, last } of curves) readout.textContent = last;
  }
}

const within = (share) => Math.min(1, Math.max(0, share));
for (const { area } of plots) {
  let share = 1;
  area.tabIndex = 0;
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    share = within((event.clientX - box.left) / box.width);
    show(share);
  });
  area.addEventListener("pointerleave", clear);
  area.addEventListener("blur", clear);
  area.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: share - 0.01, ArrowRight: share + 0.01, Home: 0, End: 1 };
    if (event.key === "Escape") clear();
    if (!(event.key in moves)) return;
    event.preventDefault();
    share = within(moves[event.key]);
    show(share);
  });
}

for (const button of document.querySelectorAll("[data-switch]")) {
  button.disabled = false;
  button.addEventListener("click", () => {
    const isOn = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", isOn);
    for (const part of document.querySelectorAll(`[data-run="${button.dataset.switch}"]`)) {
      part.classList.toggle("off", !isOn);
    }
  });
}

// The page of a run that was killed is not written any more, so one that is an hour old stays.
if (Date.now() / 1000 - document.documentElement.dataset.live < 3600) setTimeout(() => location.reload(), 30000);
