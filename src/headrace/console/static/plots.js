// Lines over time, drawn as SVG. Several series share an axis that begins at zero.

import { h, put, svg } from "./dom.js";
import { time } from "./format.js";

const WIDTH = 600;
const HEIGHT = 130;

/** The next round number: 1, 2, 5 and so on, of the units of the format. */
function nice(value, unit) {
  const power = unit ** Math.floor(Math.log(Math.max(value, 1)) / Math.log(unit));
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].filter((step) => step < unit);
  return [...steps, unit].map((step) => step * power).find((top) => top >= value) || value;
}

/** A figure with a legend that shows the last values, or those under the pointer. `show(times, values)` draws. */
export function plot(title, labels, format, { floor = 1, unit = 10 } = {}) {
  const legend = h("ul", { class: "legend" });
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const top = h("span", { class: "plot-top" });
  const when = h("span", { class: "plot-when" });
  const node = h("figure", { class: "plot" }, h("figcaption", {}, title), legend,
    h("div", { class: "plot-area" }, drawing, top), when);
  let times = [];
  let series = [];

  function describe(at) {
    put(legend, labels.map((label, number) => h("li", { class: `series-${number}` },
      h("span", {}, label), " ", h("b", {}, series[number]?.length ? format(series[number].at(at)) : "–"))));
    when.textContent = !times.length ? "no measurements yet" : at === -1 ? `since ${time(times[0])}` : time(times.at(at));
  }

  drawing.addEventListener("pointermove", (event) => {
    if (times.length < 2) return;
    const box = drawing.getBoundingClientRect();
    const at = Math.round(((event.clientX - box.left) / box.width) * (times.length - 1));
    describe(Math.min(Math.max(at, 0), times.length - 1));
  });
  drawing.addEventListener("pointerleave", () => describe(-1));
  describe(-1);

  function show(newTimes, newSeries) {
    times = newTimes;
    series = newSeries;
    const most = nice(Math.max(floor, ...series.flat()), unit);
    top.textContent = format(most);
    const x = (at) => (times.length < 2 ? WIDTH : (at / (times.length - 1)) * WIDTH);
    const y = (value) => HEIGHT - 2 - (Math.max(value, 0) / most) * (HEIGHT - 12);
    put(drawing, [0.25, 0.5, 0.75].map((part) =>
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(part * most), y2: y(part * most) })),
    series.map((values, number) => {
      const points = values.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
      const area = number === 0 && points.length > 1
        ? svg("polygon", { class: "area", points: `0,${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}` }) : null;
      return [area, svg("polyline", { class: `line series-${number}`, points: points.join(" ") })];
    }).flat());
    const words = labels.map((label, number) => `${label} ${series[number]?.length ? format(series[number].at(-1)) : "no data"}`);
    drawing.setAttribute("aria-label", `${title}: ${words.join(", ")}`);
    describe(-1);
  }
  return { node, show };
}
