// The page is complete without this. It adds a cross-hair with read-outs to the curves and switches for the runs.
"use strict";
const plots = [...document.querySelectorAll(".chart")].map((chart) => {
  const low = Number(chart.dataset.low), high = Number(chart.dataset.high);
  const readouts = [...chart.querySelectorAll(".legend li")].map((item) => item.querySelector("b"));
  const curves = [...chart.querySelectorAll("g[data-points]")].map((curve, place) => ({
    readout: readouts[place],
    last: readouts[place].textContent,
    points: curve.dataset.points.split(";").map((point) => {
      const cut = point.indexOf(" ");
      return [Number(point.slice(0, cut)), point.slice(cut + 1)];
    }),
  }));
  const { axis, log } = chart.dataset;
  return { low, high, isLog: log !== undefined, axis, curves, area: chart.querySelector(".area"), cursor: chart.querySelector(".cursor") };
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
    for (const { points, readout } of curves) readout.textContent = nearest(points, step)[1];
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
