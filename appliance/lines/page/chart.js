// Small drawings: sparklines and bars, as SVG, in the page's own colours.

const NS = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function html(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** values: newest last. low/high: what the height stands for, made wider where values need it.
 *  line: a value drawn across; values below it (or above, if `over`) are bad. */
export function spark(svg, values, { low, high, line, over = false, most = 120 }) {
  const width = 240, height = 44;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const shown = values.slice(-most);
  const bottom = Math.min(low, ...shown), top = Math.max(high, ...shown);
  const x = (i) => width - ((shown.length - 1 - i) * width) / Math.max(1, most - 1);
  const y = (v) => height - 2 - ((v - bottom) / (top - bottom || 1)) * (height - 4);
  const parts = [];
  if (line !== undefined) {
    parts.push(element("line", { class: "limit", x1: 0, x2: width, y1: y(line), y2: y(line) }));
  }
  if (shown.length) {
    const path = shown.map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("");
    const floor = y(Math.max(bottom, Math.min(top, line ?? bottom))).toFixed(1);
    parts.push(element("path", { class: "area", d: `${path}V${floor}H${x(0).toFixed(1)}Z` }));
    parts.push(element("path", { class: "trace", d: path }));
    shown.forEach((v, i) => {
      if (line !== undefined && (over ? v > line : v < line)) {
        parts.push(element("line", { class: "bad", x1: x(i), x2: x(i), y1: y(line), y2: y(v) }));
      }
    });
  }
  svg.replaceChildren(...parts);
}

/** counts: heights; labels: under the bars, may be empty; bad: index from which bars are bad. */
export function bars(svg, counts, labels, bad) {
  const width = 320, height = 110, foot = 16, step = width / counts.length;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const top = Math.max(1, ...counts);
  const parts = [];
  counts.forEach((count, i) => {
    // A single late tick among a million must be seen: heights are logarithmic.
    const tall = count ? Math.max(3, (Math.log1p(count) / Math.log1p(top)) * (height - foot - 4)) : 0;
    const bar = element("rect", {
      class: i >= bad ? "bar bad" : "bar", x: i * step + 1, width: step - 2, rx: 1.5,
      y: height - foot - tall, height: tall,
    });
    bar.append(element("title", {}, `${labels[i]}: ${count} ticks`));
    parts.push(bar);
  });
  parts.push(element("line", { class: "axis", x1: 0, x2: width, y1: height - foot, y2: height - foot }));
  for (const [i, anchor] of [[0, "start"], [Math.floor(bad / 2), "middle"], [bad, "end"]]) {
    const at = i === bad ? width : i * step;
    const words = i === bad ? "late" : labels[i].split("–")[0] + " ms";
    parts.push(element("text", { class: i === bad ? "late" : "", x: at, y: height - 3, "text-anchor": anchor }, words));
  }
  svg.replaceChildren(...parts);
}

/** curve: [x, y] points; dots: [x, y, label]. */
export function curve(svg, points, dots, words) {
  const width = 320, height = 110, foot = 16;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const right = Math.max(1, points.at(-1)?.[0] ?? 1), top = Math.max(1, ...points.map((p) => p[1])) * 1.1;
  const x = (v) => (Math.min(v, right) / right) * (width - 10) + 5;
  const y = (v) => height - foot - (v / top) * (height - foot - 6);
  const d = points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const parts = [
    element("line", { class: "axis", x1: 0, x2: width, y1: height - foot, y2: height - foot }),
  ];
  if (points.length) parts.push(element("path", { class: "trace", d }));
  for (const [a, b, label] of dots) {
    const dot = element("circle", { class: "dot", cx: x(a), cy: y(b), r: 4 });
    dot.append(element("title", {}, label));
    parts.push(dot);
  }
  parts.push(element("text", { x: 5, y: height - 3 }, words[0]));
  parts.push(element("text", { x: width - 5, y: height - 3, "text-anchor": "end" }, words[1]));
  svg.replaceChildren(...parts);
}
