"use strict";
// Draws the pictures and tables of the page from the data in it. Text from the data is only ever set as text.
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const chosen = { model: 0, bins: "width", state: null, beside: true, confidence: null, scale: "share" };
  const find = (id) => document.getElementById(id);
  const model = () => data.models[chosen.model];
  const percentOf = (level) => `${Number((100 * level).toPrecision(4))}\u00a0%`;

  // Elements

  function element(tag, attributes = {}, ...children) {
    return filled(document.createElement(tag), attributes, children);
  }

  function shape(tag, attributes = {}, ...children) {
    return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  }

  function filled(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  // A text from the data: kept apart from the direction of what stands around it.
  const word = (text) => element("bdi", { class: "cut", title: text.length > 40 ? text : null }, text);

  function replaced(host, ...children) {
    host.replaceChildren(...children);
    return host;
  }

  // Numbers as words

  // Round as Python does, exact ties to even, so that the page and the terminal show the same digits.
  function fixed(value, digits) {
    const exact = value.toFixed(digits + 40);
    const cut = exact.length - 40;
    const lower = exact.slice(0, cut).replace(/\.$/, "");
    return /^50*$/.test(exact.slice(cut)) && Number(lower.at(-1)) % 2 === 0 ? lower : value.toFixed(digits);
  }
  const percent = (share, digits = 1) => `${fixed(100 * share, digits)}\u00a0%`;
  // A probability is never shown as 0 or 1 where it is not.
  function probability(share) {
    if (share > 0.9999) return ">\u00a099.99\u00a0%";
    if (share < 0.0001) return "<\u00a00.01\u00a0%";
    return percent(share, share > 0.99 || share < 0.01 ? 2 : 1);
  }
  const whole = (count) => Number(count.toFixed(1)).toLocaleString("en");
  const samples = (count) => `${whole(count)} ${count === 1 ? "sample" : "samples"}`;
  const signed = (share, digits = 1) => `${share < 0 ? "−" : "+"}${fixed(Math.abs(100 * share), digits)}`;
  const range = (low, high, digits = 1) => `${fixed(100 * low, digits)} to ${percent(high, digits)}`;
  const short = (value) => String(Number(value.toPrecision(3)));
  const edge = (value) => String(Number(value.toPrecision(value > 0.99 ? 5 : 3)));
  const span = (lower, upper) => `${edge(lower)} to ${edge(upper)}`;
  const tick = (value) => `${short(100 * value)}\u00a0%`;
  const share = (value) => percent(value, value > 0.99 || value < 0.01 ? 2 : 1);

  function shown(result) {
    if (!result || result.value === null) return "";
    const scale = result.percent ? 100 : 1;
    const digits = result.percent ? 2 : 3;
    const unit = result.percent ? "\u00a0%" : "";
    const around = result.low === null ? "" : ` [${fixed(scale * result.low, digits)}, ${fixed(scale * result.high, digits)}]`;
    return `${fixed(scale * result.value, digits)}${unit}${around}`;
  }

  function className(index) {
    const names = model().names === null || model().names === undefined ? null : data.names[model().names];
    return names === null ? `class ${index}` : names[index];
  }

  // Figures: a title, a drawing that follows the width of its place, a legend, and a table that says the same

  const drawings = new Map();
  const observer = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const drawing = drawings.get(entry.target);
      const width = Math.floor(entry.contentRect.width);
      if (drawing && width > 0 && width !== drawing.width) {
        drawing.width = width;
        requestAnimationFrame(() => drawn(entry.target));
      }
    }
  });

  function drawn(place) {
    const drawing = drawings.get(place);
    if (drawing && place.isConnected) replaced(place, drawing.draw(drawing.width), tip(place));
  }

  function tip(place) {
    const box = element("div", { class: "tip", "aria-hidden": "true", hidden: true });
    place.tip = box;
    return box;
  }

  // `table` gives the head and the rows of the table; it is filled when someone opens it.
  function figure(host, { title, note = "", draw, legend = [], table }) {
    for (const old of host.querySelectorAll(".drawing")) {
      observer.unobserve(old);
      drawings.delete(old);
    }
    const place = element("div", { class: "drawing" });
    const body = element("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": `${title}: table` });
    const details = element("details", { class: "as-table" }, element("summary", {}, "As a table"), body);
    details.addEventListener("toggle", () => {
      if (details.open && !body.firstChild) body.append(tableOf(...table()));
    });
    const caption = element("figcaption", {}, word(title), element("span", { class: "note" }, note));
    const keys = element("ul", { class: "legend" }, ...legend.map(([key, text]) => element("li", {}, key, word(text))));
    replaced(host, element("figure", {}, caption, place, ...(legend.length ? [keys] : []), details));
    drawings.set(place, { draw, width: Math.max(200, Math.floor(place.getBoundingClientRect().width) || 640) });
    drawn(place);
    observer.observe(place);
    return place;
  }

  function tableOf(head, rows) {
    const cell = (value, place) => (place ? element("td", {}, String(value)) : element("th", { scope: "row" }, word(String(value))));
    return element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell)))),
    );
  }

  const swatch = (...shapes) => shape("svg", { viewBox: "0 0 26 13", "aria-hidden": "true" }, ...shapes);
  const lineKey = (kind) => swatch(shape("path", { class: kind, d: "M0 7H26" }));
  const boxKey = (attributes) => swatch(shape("rect", { x: 1, y: 1, width: 24, height: 11, ...attributes }));

  // Drawing

  function canvas(width, height, label) {
    const root = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${label}. Arrow keys move through it.` });
    root.addEventListener("keydown", moved);
    return root;
  }

  // One stop of a drawing for the Tab key; arrows move between its marks.
  function moved(event) {
    const stops = [...event.currentTarget.querySelectorAll(".stop")];
    const place = stops.indexOf(document.activeElement);
    if (place < 0) return;
    const rows = { ArrowDown: 1, ArrowUp: -1 };
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -place, End: stops.length - 1 - place, ...rows };
    if (event.key === "Escape") hideTip(stops[place]);
    if (!(event.key in steps)) return;
    event.preventDefault();
    const along = stops[Math.min(stops.length - 1, Math.max(0, place + steps[event.key]))];
    const next = (event.key in rows && above(stops, stops[place], rows[event.key])) || along;
    stops[place].setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  }

  // The mark of the next row, above or below, that is nearest; null where all marks are in one row.
  function above(stops, from, way) {
    const at = (one) => ({ x: Number(one.firstChild.getAttribute("x")), y: Number(one.firstChild.getAttribute("y")) });
    const here = at(from);
    const far = (one) => way * (at(one).y - here.y) * 1e4 + Math.abs(at(one).x - here.x);
    const others = stops.filter((one) => way * (at(one).y - here.y) > 0);
    return others.reduce((best, one) => (best === null || far(one) < far(best) ? one : best), null);
  }

  // A place of a drawing that can be pointed at, or reached by keys, and then says what is there.
  function stop(root, hit, lines, dots = []) {
    const first = !root.querySelector(".stop");
    const group = shape("g", { class: "stop", role: "img", tabindex: first ? 0 : -1, "aria-label": lines.join(", ") });
    group.append(shape("rect", { class: "hit", ...hit }), ...dots);
    const show = () => showTip(group, hit, lines);
    const hide = () => hideTip(group);
    group.addEventListener("pointerenter", show);
    group.addEventListener("pointerleave", () => document.activeElement === group || hide());
    group.addEventListener("click", show);
    group.addEventListener("focus", show);
    group.addEventListener("blur", hide);
    root.append(group);
  }

  function showTip(group, hit, lines) {
    const place = group.closest(".drawing");
    if (!place) return;
    for (const other of place.querySelectorAll(".stop.shown")) other.classList.remove("shown");
    group.classList.add("shown");
    const box = place.tip;
    replaced(box, ...lines.map((line) => element("div", {}, line)));
    box.hidden = false;
    const scale = place.clientWidth / place.querySelector("svg").viewBox.baseVal.width;
    const most = place.clientWidth - box.offsetWidth;
    const [from, to] = [hit.x * scale, (hit.x + hit.width) * scale];
    if (hit.height > 80) {
      // Beside a tall mark, on the side with more room, so that its foot and the legend stay in sight.
      const left = from > place.clientWidth - to ? from - box.offsetWidth - 6 : to + 6;
      box.style.left = `${Math.max(0, Math.min(left, most))}px`;
      box.style.top = `${hit.y * scale + 8}px`;
    } else {
      const above = hit.y * scale - box.offsetHeight - 6;
      box.style.left = `${Math.max(0, Math.min((from + to - box.offsetWidth) / 2, most))}px`;
      box.style.top = `${above >= -40 ? above : (hit.y + hit.height) * scale + 6}px`;
    }
  }

  function hideTip(group) {
    group.classList.remove("shown");
    const place = group.closest(".drawing");
    if (place && !place.querySelector(".stop.shown")) place.tip.hidden = true;
  }

  const box = (width, height, top = 10, left = 58, right = 18) => ({ left, top, width: width - left - right, height, right: width - right, bottom: top + height });
  const scaled = (from, to, start, end) => (value) => start + ((value - from) / (to - from || 1)) * (end - start);

  function ticks(from, to, most) {
    const raw = (to - from) / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= raw * 0.999);
    const found = [];
    for (let value = Math.ceil(from / step - 1e-9) * step; value <= to + step * 1e-6; value += step) found.push(Number(value.toPrecision(10)));
    return found;
  }

  // Axes, grid and names of the axes; `x` and `y` are { at, ticks, text, name }.
  function axes(root, area, x, y) {
    for (const value of y.ticks) {
      root.append(shape("line", { class: "grid", x1: area.left, x2: area.right, y1: y.at(value), y2: y.at(value) }));
      root.append(shape("text", { x: area.left - 6, y: y.at(value) + (value && y.shift ? y.shift : 4), "text-anchor": "end" }, y.text(value)));
    }
    for (const value of x.ticks) {
      root.append(shape("line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: area.top, y2: area.bottom }));
      if (x.text) root.append(shape("text", { x: x.at(value), y: area.bottom + 16, "text-anchor": "middle" }, x.text(value)));
    }
    if (x.name) root.append(shape("text", { class: "axis", x: (area.left + area.right) / 2, y: area.bottom + 34, "text-anchor": "middle" }, x.name));
    if (y.name) {
      const middle = (area.top + area.bottom) / 2;
      root.append(shape("text", { class: "axis", "text-anchor": "middle", transform: `translate(11 ${middle}) rotate(-90)` }, y.name));
    }
  }

  const path = (points) => points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  // Reliability diagrams

  const GAP = 0.0101;

  function reliability(host, title, diagram, kind, { note = "", small = false, said = "confidence" } = {}) {
    if (kind === "smooth") return smooth(host, title, diagram, note);
    const rows = diagram.bins;
    const even = kind === "mass";
    const lines = rows.map(([lower, upper, held, confidence, accuracy, low, high]) => [
      `${said} ${span(lower, upper)}`,
      samples(held),
      `mean ${said} ${probability(confidence)}`,
      `right ${share(accuracy)} (${range(low, high)})`,
      gapWords(confidence - accuracy),
    ]);
    return figure(host, {
      title,
      note,
      draw: (width) => bars(width, title, rows, lines, even, said, small),
      legend: small ? [] : [
        [boxKey({ class: "bar" }), "share that is right"],
        [swatch(shape("path", { class: "said", d: "M0 7H26" })), `mean ${said}`],
        [boxKey({ fill: "url(#hatch-over)" }), "over-confident"],
        [boxKey({ fill: "url(#hatch-under)" }), "under-confident"],
        [swatch(shape("path", { class: "whisker", d: "M13 0V13M9 1H17M9 12H17" })), `${percentOf(data.level)} range`],
      ],
      table: () => [
        ["Group", "Samples", `Mean ${said}`, "Right", "Range", "Gap in points"],
        rows.map(([lower, upper, held, confidence, accuracy, low, high]) => [
          span(lower, upper), whole(held), probability(confidence), percent(accuracy, 2), range(low, high, 2), signed(confidence - accuracy, 2),
        ]),
      ],
    });
  }

  function gapWords(gap) {
    if (Math.abs(gap) < 0.0005) return "no gap";
    return `${fixed(Math.abs(100 * gap), 1)} points ${gap > 0 ? "over-confident" : "under-confident"}`;
  }

  function bars(width, title, rows, lines, even, said, small) {
    const area = box(width, Math.min(width - 76, small ? 220 : 330));
    const below = box(width, small ? 34 : 54, area.bottom + 14);
    const root = canvas(width, below.bottom + 40, `Reliability diagram, ${title}`);
    const y = scaled(0, 1, area.bottom, area.top);
    const columns = rows.length;
    const ends = even
      ? rows.map((_, place) => [place / columns, (place + 1) / columns])
      : rows.map(([lower, upper]) => [lower, upper]);
    const x = scaled(0, 1, area.left, area.right);
    const fifths = [0, 0.2, 0.4, 0.6, 0.8, 1];
    axes(root, area, { at: x, ticks: even ? [] : fifths }, { at: y, ticks: fifths, text: (v) => v.toFixed(1), name: "share that is right" });
    const most = Math.max(...rows.map((row) => row[2]));
    const deep = scaled(0, most, below.bottom, below.top);
    const every = Math.ceil((columns * 34) / area.width);
    axes(
      root,
      below,
      even
        ? { at: (place) => x((place + 0.5) / columns), ticks: [], text: null, name: `mean ${said} of the group` }
        : { at: x, ticks: fifths, text: (v) => v.toFixed(1), name: said },
      { at: deep, ticks: [0, most], text: (v) => (v ? compact(v) : "0"), name: null, shift: 8 },
    );
    if (even) {
      rows.forEach((row, place) => {
        if ((columns - 1 - place) % every === 0) {
          root.append(shape("text", { x: x((place + 0.5) / columns), y: below.bottom + 16, "text-anchor": "middle" }, row[3].toFixed(2)));
        }
      });
    } else {
      root.append(shape("path", { class: "ideal", d: `M${x(0)} ${y(0)}L${x(1)} ${y(1)}` }));
    }
    rows.forEach(([, , held, confidence, accuracy, low, high], place) => {
      const [from, to] = ends[place].map(x);
      const left = from + 1;
      const wide = Math.max(1.5, to - from - 2);
      const middle = left + wide / 2;
      root.append(shape("rect", { class: "bar", x: left, width: wide, y: y(accuracy), height: y(0) - y(accuracy) }));
      const [upper, lower] = [Math.max(confidence, accuracy), Math.min(confidence, accuracy)];
      const fill = confidence > accuracy ? "url(#hatch-over)" : "url(#hatch-under)";
      root.append(shape("rect", { class: confidence > accuracy ? "gap-over" : "gap-under", x: left, width: wide, y: y(upper), height: Math.max(0, y(lower) - y(upper)), fill }));
      root.append(shape("line", { class: "said", x1: left, x2: left + wide, y1: y(confidence), y2: y(confidence) }));
      const cap = Math.min(5, wide / 3);
      root.append(shape("path", {
        class: "whisker",
        d: `M${middle} ${y(low)}V${y(high)}M${middle - cap} ${y(low)}H${middle + cap}M${middle - cap} ${y(high)}H${middle + cap}`,
      }));
      root.append(shape("rect", { class: "density", x: left, width: wide, y: deep(held), height: below.bottom - deep(held) }));
    });
    root.append(shape("rect", { class: "frame", x: area.left, y: area.top, width: area.width, height: area.height }));
    rows.forEach((row, place) => {
      const [from, to] = ends[place].map(x);
      const wide = Math.max(6, to - from);
      stop(root, { x: from - (wide - (to - from)) / 2, width: wide, y: area.top, height: below.bottom - area.top }, lines[place]);
    });
    return root;
  }

  const compact = (count) => (count >= 1e6 ? `${short(count / 1e6)}M` : count >= 1e4 ? `${Math.round(count / 1e3)}k` : whole(count));

  function smooth(host, title, diagram, note) {
    const rows = diagram.points;
    if (!rows.length) return replaced(host, element("p", { class: "note" }, `${title}: the samples are too few for a smooth diagram.`));
    const every = Math.max(1, Math.round(rows.length / 24));
    const picked = rows.filter((_, place) => place % every === 0 || place === rows.length - 1);
    return figure(host, {
      title,
      note: `${note} Kernel width ${short(diagram.bandwidth)}; the range is approximate.`.trim(),
      draw: (width) => {
        const area = box(width, Math.min(width - 76, 330));
        const below = box(width, 54, area.bottom + 14);
        const root = canvas(width, below.bottom + 40, `Smooth reliability diagram, ${title}`);
        const x = scaled(0, 1, area.left, area.right);
        const y = scaled(0, 1, area.bottom, area.top);
        const most = Math.max(...rows.map((row) => row[4]));
        const deep = scaled(0, most, below.bottom, below.top);
        const fifths = [0, 0.2, 0.4, 0.6, 0.8, 1];
        axes(root, area, { at: x, ticks: fifths }, { at: y, ticks: fifths, text: (v) => v.toFixed(1), name: "share that is right" });
        axes(root, below, { at: x, ticks: fifths, text: (v) => v.toFixed(1), name: "confidence" }, { at: deep, ticks: [], text: String });
        root.append(shape("path", { class: "ideal", d: `M${x(0)} ${y(0)}L${x(1)} ${y(1)}` }));
        for (const part of parts(rows, GAP)) {
          const upper = part.map((row) => [x(row[0]), y(row[3])]);
          const lower = part.map((row) => [x(row[0]), y(row[2])]).reverse();
          root.append(shape("path", { class: "range", d: `${path([...upper, ...lower])}Z` }));
          root.append(shape("path", { class: "line line-0", d: path(part.map((row) => [x(row[0]), y(row[1])])) }));
          const ground = [[x(part[part.length - 1][0]), below.bottom], [x(part[0][0]), below.bottom]];
          root.append(shape("path", { class: "density", d: `${path([...part.map((row) => [x(row[0]), deep(row[4])]), ...ground])}Z` }));
        }
        root.append(shape("rect", { class: "frame", x: area.left, y: area.top, width: area.width, height: area.height }));
        picked.forEach((row) => {
          const wide = Math.max(6, area.width / 26);
          const dot = shape("circle", { class: "dot line-0", cx: x(row[0]), cy: y(row[1]), r: 4.5 });
          stop(root, { x: x(row[0]) - wide / 2, width: wide, y: area.top, height: below.bottom - area.top }, [
            `around confidence ${row[0].toFixed(2)}`,
            `worth ${samples(Math.round(row[5]))}`,
            `right ${percent(row[1])} (${range(row[2], row[3])})`,
            gapWords(row[0] - row[1]),
          ], [dot]);
        });
        return root;
      },
      legend: [
        [lineKey("line line-0"), "share that is right"],
        [boxKey({ class: "range" }), `${percentOf(data.level)} range`],
        [lineKey("ideal"), "confidence"],
      ],
      table: () => [
        ["Confidence", "Worth of samples", "Right", "Range", "Gap in points"],
        picked.map((row) => [row[0].toFixed(2), whole(Math.round(row[5])), percent(row[1], 2), range(row[2], row[3], 2), signed(row[0] - row[1], 2)]),
      ],
    });
  }

  function parts(rows, gap) {
    const found = [];
    rows.forEach((row, place) => {
      if (!place || row[0] - rows[place - 1][0] > gap * 1.5) found.push([]);
      found[found.length - 1].push(row);
    });
    return found;
  }

  const stateName = (state) => (state.name === "as given" ? "As given" : `After ${state.name}`);

  function errorNote(state, kind) {
    const name = { width: "ece", mass: "aece", smooth: "smooth_ece" }[kind];
    const result = state.results[name];
    if (!result) return "";
    const chance = result.chance === null ? "" : `, ${percent(result.chance, 2)} by chance`;
    return `${result.name} ${shown(result)}${chance}.`;
  }

  function drawReliability() {
    const states = model().states;
    const wanted = states[chosen.state];
    const both = chosen.beside && chosen.state > 0 ? [states[0], wanted] : [wanted];
    const hosts = both.map((state) => {
      const host = element("div");
      const diagram = state.diagrams[chosen.bins];
      return [host, state, diagram];
    });
    replaced(find("reliability-diagrams"), ...hosts.map(([host]) => host));
    for (const [host, state, diagram] of hosts) {
      if (diagram) reliability(host, stateName(state), diagram, chosen.bins, { note: errorNote(state, chosen.bins) });
      else replaced(host, element("p", { class: "note" }, `${stateName(state)}: this report holds no smooth diagram.`));
    }
  }

  // Radio buttons for the states of the model, before and after each calibrator
  function stateChoice(host, group, current, changed) {
    const legend = host.querySelector("legend");
    const labels = model().states.map((state, place) => {
      const input = element("input", { type: "radio", name: group, value: place, checked: place === current });
      input.addEventListener("change", () => changed(place));
      return element("label", {}, input, word(state.name === "as given" ? "as given" : `after ${state.name}`));
    });
    replaced(host, legend, ...labels);
  }

  function setUpReliability() {
    const count = model().states.length;
    chosen.state = count > 1 ? 1 : 0;
    const host = find("reliability-states");
    stateChoice(host, "reliability-state", chosen.state, (place) => {
      chosen.state = place;
      drawReliability();
    });
    if (count > 1) {
      const input = element("input", { type: "checkbox", id: "beside", checked: chosen.beside });
      input.addEventListener("change", () => {
        chosen.beside = input.checked;
        drawReliability();
      });
      host.append(element("label", {}, input, "beside as given"));
    }
    drawReliability();
  }

  // Confidence of right and wrong answers

  function drawConfidences() {
    const state = model().states[chosen.confidence];
    const host = find("confidence-histogram");
    const held = state.confidences;
    if (!held) return replaced(host, element("p", { class: "note" }, "This report holds no single confidences."));
    const total = { right: sum(held.right), wrong: sum(held.wrong) };
    const log = chosen.scale === "log";
    const height = (kind, count) => {
      if (chosen.scale === "share") return total[kind] ? count / total[kind] : 0;
      return log ? Math.log10(1 + count) : count;
    };
    const bins = held.right.map((_, place) => place).filter((place) => held.right[place] + held.wrong[place] > 0);
    const most = Math.max(1e-9, ...bins.map((place) => Math.max(height("right", held.right[place]), height("wrong", held.wrong[place]))));
    const text = (value) => {
      if (chosen.scale === "share") return tick(Math.abs(value));
      return compact(log ? Math.round(10 ** Math.abs(value) - 1) : Math.abs(value));
    };
    return figure(host, {
      title: `${stateName(state)}: confidence of right and wrong answers`,
      note: `${whole(total.right)} right, ${whole(total.wrong)} wrong.`,
      draw: (width) => {
        const area = box(width, Math.min(300, width * 0.75));
        const root = canvas(width, area.bottom + 42, "Histogram of confidence, right answers above, wrong ones below");
        const x = scaled(0, 1, area.left, area.right);
        const y = scaled(-most, most, area.bottom, area.top);
        const marks = log ? [0, 1, 2, 3, 4, 5, 6].filter((v) => v <= most).map((v) => Math.log10(1 + 10 ** v)) : ticks(0, most, 3);
        const both = [...new Set([0, ...marks, ...marks.map((v) => -v)])].filter((v) => Math.abs(v) <= most);
        const name = { share: "share of its kind", count: "samples", log: "samples, log scale" }[chosen.scale];
        axes(root, area, { at: x, ticks: [0, 0.2, 0.4, 0.6, 0.8, 1], text: (v) => v.toFixed(1), name: "confidence" }, { at: y, ticks: both, text, name });
        for (const place of bins) {
          const left = x(held.edges[place]) + 0.5;
          const wide = x(held.edges[place + 1]) - left - 0.5;
          for (const kind of ["right", "wrong"]) {
            const end = y(height(kind, held[kind][place]) * (kind === "right" ? 1 : -1));
            root.append(shape("rect", { class: kind, x: left, width: wide, y: Math.min(end, y(0)), height: Math.abs(end - y(0)) }));
          }
        }
        root.append(shape("path", { class: "frame", d: `M${area.left} ${y(0)}H${area.right}` }));
        for (const place of bins) {
          const left = x(held.edges[place]);
          stop(root, { x: left, width: x(held.edges[place + 1]) - left, y: area.top, height: area.height }, [
            `confidence ${short(held.edges[place])} to ${short(held.edges[place + 1])}`,
            `${whole(held.right[place])} right (${percent(total.right ? held.right[place] / total.right : 0)} of them)`,
            `${whole(held.wrong[place])} wrong (${percent(total.wrong ? held.wrong[place] / total.wrong : 0)} of them)`,
          ]);
        }
        return root;
      },
      legend: [[boxKey({ class: "right" }), "right answers"], [boxKey({ class: "wrong" }), "wrong answers"]],
      table: () => [
        ["Confidence", "Right", "Wrong", "Share that is right"],
        bins.map((place) => [
          `${short(held.edges[place])} to ${short(held.edges[place + 1])}`, whole(held.right[place]), whole(held.wrong[place]),
          percent(held.right[place] / (held.right[place] + held.wrong[place])),
        ]),
      ],
    });
  }

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  function setUpConfidences() {
    chosen.confidence = 0;
    stateChoice(find("confidence-states"), "confidence-state", 0, (place) => {
      chosen.confidence = place;
      drawConfidences();
    });
    drawConfidences();
  }

  // Class table

  const PAGE = 20;
  const classes = { rows: [], found: [], sort: "weight", up: false, page: 0, row: null, kind: "of_answers" };
  const COLUMNS = [
    ["name", "Class", (row) => row.name],
    ["labels", "Labels", (row) => whole(row.labels)],
    ["answers", "Answers", (row) => whole(row.answers)],
    ["recall", "Recall", (row) => optional(row.recall)],
    ["precision", "Precision", (row) => optional(row.precision)],
    ["confidence", "Confidence", (row) => optional(row.confidence)],
    ["gap", "Gap", (row) => (row.gap === null ? "–" : signed(row.gap))],
    ["weight", "Weight", (row) => signed(row.weight, 2)],
    ["error", "ECE", (row) => (row.error === null ? "–" : percent(row.error, 2))],
  ];
  const optional = (share) => (share === null ? "–" : percent(share));

  function setUpClasses() {
    const table = model().class_table;
    if (!table) return;
    const n = model().n;
    const place = new Map(table.drawn.map((index, where) => [index, where]));
    classes.rows = table.class.map((index, where) => {
      const [labels, answers, right] = [table.labels[where], table.answers[where], table.right[where]];
      const precision = answers ? right / answers : null;
      const confidence = answers ? table.confidence[where] : null;
      const gap = answers ? confidence - precision : null;
      return {
        index, labels, answers, precision, confidence, gap,
        name: className(index),
        folded: className(index).toLowerCase(),
        recall: labels ? right / labels : null,
        weight: answers ? (gap * answers) / n : 0,
        error: table.error ? table.error[where] : null,
        drawn: place.has(index) ? place.get(index) : null,
      };
    });
    Object.assign(classes, { sort: "weight", up: false, page: 0 });
    find("class-search").value = "";
    const other = find("class-kind").querySelector('[value="of_probability"]');
    other.disabled = !table.of_probability;
    if (other.disabled && classes.kind === "of_probability") {
      classes.kind = "of_answers";
      find("class-kind").querySelector('[value="of_answers"]').checked = true;
    }
    headClasses();
    sortClasses();
    searchClasses();
    chooseClass(classes.found.find((row) => row.drawn !== null) || null, false);
  }

  function headClasses() {
    const head = element("tr", {}, ...COLUMNS.map(([key, text]) => {
      const button = element("button", { type: "button", "data-sort": key }, text);
      button.addEventListener("click", () => {
        classes.up = classes.sort === key ? !classes.up : key === "name";
        classes.sort = key;
        classes.page = 0;
        sortClasses();
        searchClasses();
      });
      return element("th", { scope: "col", "data-key": key }, button);
    }));
    replaced(find("class-table").tHead, head);
  }

  function sortClasses() {
    const { sort, up } = classes;
    const order = up ? 1 : -1;
    const value = (row) => (sort === "weight" ? Math.abs(row.weight) : row[sort]);
    const collator = new Intl.Collator("en", { numeric: true });
    classes.rows.sort((a, b) => {
      if (sort === "name") return order * collator.compare(a.name, b.name) || a.index - b.index;
      const [left, right] = [value(a), value(b)];
      if (left === null || right === null) return (left === null) - (right === null) || a.index - b.index;
      return order * (left - right) || a.index - b.index;
    });
    for (const head of find("class-table").tHead.querySelectorAll("th")) {
      const current = head.dataset.key === sort;
      if (current) head.setAttribute("aria-sort", up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
      const text = COLUMNS.find(([key]) => key === head.dataset.key)[1];
      head.firstChild.textContent = current ? `${text} ${up ? "▲" : "▼"}` : text;
    }
  }

  function searchClasses() {
    const wanted = find("class-search").value.trim().toLowerCase();
    classes.found = wanted ? classes.rows.filter((row) => row.folded.includes(wanted) || String(row.index) === wanted) : classes.rows.slice();
    pageClasses();
  }

  function pageClasses() {
    const pages = Math.max(1, Math.ceil(classes.found.length / PAGE));
    classes.page = Math.min(Math.max(0, classes.page), pages - 1);
    const rows = classes.found.slice(classes.page * PAGE, (classes.page + 1) * PAGE);
    replaced(find("class-table").tBodies[0], ...rows.map(classRow));
    find("class-count").textContent = `${whole(classes.found.length)} of ${whole(classes.rows.length)} classes`;
    find("class-page").textContent = `Page ${classes.page + 1} of ${pages}`;
    find("class-before").disabled = classes.page === 0;
    find("class-after").disabled = classes.page === pages - 1;
    find("class-after").parentElement.hidden = pages === 1;
  }

  function classRow(row) {
    const button = element("button", { type: "button" }, word(row.name));
    const line = element("tr", { class: classes.row === row ? "chosen" : null }, element("th", { scope: "row" }, button));
    for (const [key, , text] of COLUMNS.slice(1)) {
      const tone = key === "gap" && row.gap !== null && row.gap !== 0 ? (row.gap > 0 ? "over" : "under") : null;
      line.append(element("td", { class: tone }, text(row)));
    }
    line.addEventListener("click", () => chooseClass(row, true));
    return line;
  }

  function chooseClass(row, seen) {
    classes.row = row;
    for (const line of find("class-table").tBodies[0].rows) line.classList.remove("chosen");
    const place = row === null ? -1 : classes.found.indexOf(row) - classes.page * PAGE;
    const line = find("class-table").tBodies[0].rows[place];
    if (line) line.classList.add("chosen");
    drawClass();
    if (seen) find("class-panel").scrollIntoView({ block: "nearest" });
  }

  function drawClass() {
    const { row, kind } = classes;
    const host = find("class-diagram");
    if (row === null) {
      replaced(find("class-chosen"));
      return replaced(host);
    }
    replaced(find("class-chosen"), word(row.name));
    const table = model().class_table;
    const cells = row.drawn === null || !table[kind] ? null : table[kind][row.drawn];
    if (!cells || !cells.length) {
      const why = row.drawn === null ? "Only the classes with most answers have diagrams on this page." : "The model never answers with this class.";
      return replaced(host, element("p", { class: "note" }, why));
    }
    const rows = cells.map(([bin, ...rest]) => [bin / table.bins, (bin + 1) / table.bins, ...rest]);
    const asked = kind === "of_answers" ? "confidence" : "probability";
    const note = kind === "of_answers"
      ? `When it answers so: ${samples(row.answers)}.`
      : "Its probability in all samples, against how often it is the label.";
    const title = kind === "of_answers" ? "Answers of this class" : "Probability of this class";
    return reliability(host, title, { bins: rows }, "width", { note, said: asked });
  }

  // Over and under, by class and confidence

  const ROWS = 25;
  const map = { order: "weight", page: 0 };

  function drawMap() {
    const table = model().class_table;
    if (!table) return;
    const keys = {
      weight: (row) => -Math.abs(row.weight), over: (row) => -row.weight, under: (row) => row.weight, answers: (row) => -row.answers, number: (row) => row.index,
    };
    const all = classes.rows.filter((row) => row.drawn !== null && row.answers > 0);
    all.sort((a, b) => keys[map.order](a) - keys[map.order](b) || a.index - b.index);
    const pages = Math.max(1, Math.ceil(all.length / ROWS));
    map.page = Math.min(Math.max(0, map.page), pages - 1);
    const rows = all.slice(map.page * ROWS, (map.page + 1) * ROWS);
    find("map-page").textContent = `Classes ${rows.length ? map.page * ROWS + 1 : 0} to ${map.page * ROWS + rows.length} of ${all.length}`;
    find("map-before").disabled = map.page === 0;
    find("map-after").disabled = map.page === pages - 1;
    find("map-after").parentElement.hidden = pages === 1;
    const cells = rows.map((row) => table.of_answers[row.drawn]);
    const words = (row, [bin, held, confidence, accuracy, low, high]) => [
      row.name.length > 60 ? `${row.name.slice(0, 60)}…` : row.name,
      `confidence ${short(bin / table.bins)} to ${short((bin + 1) / table.bins)}`,
      samples(held),
      `mean confidence ${percent(confidence)}, right ${percent(accuracy)} (${range(low, high)})`,
      gapWords(confidence - accuracy),
    ];
    figure(find("map-figure"), {
      title: "Gap of confidence and accuracy",
      note: "The stronger the colour, the larger the gap, up to 30 points. Cells without a sign are pale: chance may explain them.",
      draw: (width) => {
        const longest = Math.max(...rows.map((row) => row.name.length));
        const left = Math.min(200, width * 0.34, 16 + 7.6 * longest);
        const high = 24;
        const area = { left, right: width - 6, top: 6, width: width - 6 - left, height: rows.length * high, bottom: 6 + rows.length * high };
        const root = canvas(width, area.bottom + 42, "Map of over- and under-confidence by class and confidence");
        const x = scaled(0, 1, area.left, area.right);
        const letters = Math.floor((left - 8) / 7.6);
        rows.forEach((row, place) => {
          const top = area.top + place * high;
          const name = row.name.length > letters ? `${row.name.slice(0, Math.max(1, letters - 1))}…` : row.name;
          root.append(shape("text", { class: "row", x: left - 8, y: top + 16, "text-anchor": "end", "unicode-bidi": "isolate" }, name));
          for (let bin = 0; bin < table.bins; bin += 1) {
            root.append(shape("rect", { class: "cell none", x: x(bin / table.bins), width: area.width / table.bins, y: top, height: high }));
          }
        });
        for (const value of [0, 0.2, 0.4, 0.6, 0.8, 1]) {
          root.append(shape("text", { x: x(value), y: area.bottom + 16, "text-anchor": value === 1 ? "end" : "middle" }, value.toFixed(1)));
        }
        root.append(shape("text", { class: "axis", x: (area.left + area.right) / 2, y: area.bottom + 34, "text-anchor": "middle" }, "confidence"));
        rows.forEach((row, place) => {
          for (const cell of cells[place]) {
            const [bin, , confidence, accuracy, low, top] = cell;
            const gap = confidence - accuracy;
            const hit = { x: x(bin / table.bins), width: area.width / table.bins, y: area.top + place * high, height: high };
            const clear = confidence < low || confidence > top;
            const strength = Math.min(1, 0.1 + Math.abs(gap) / 0.3) * (clear ? 1 : 0.35);
            root.append(shape("rect", { class: `cell ${gap > 0 ? "over-fill" : "under-fill"}`, "fill-opacity": strength.toFixed(2), ...hit }));
            if (clear) {
              root.append(shape("text", { class: "sign", x: hit.x + hit.width / 2, y: hit.y + 17 }, gap > 0 ? "+" : "−"));
            }
            stop(root, hit, words(row, cell));
          }
        });
        return root;
      },
      legend: [
        [boxKey({ class: "over-fill" }), "over-confident"],
        [boxKey({ class: "under-fill" }), "under-confident"],
        [boxKey({ class: "cell none" }), "no samples"],
      ],
      table: () => [
        ["Class", "Confidence", "Samples", "Mean confidence", "Right", "Gap in points", "Shown"],
        rows.flatMap((row, place) => cells[place].map(([bin, held, confidence, accuracy, low, high]) => [
          row.name, `${short(bin / table.bins)} to ${short((bin + 1) / table.bins)}`, whole(held), percent(confidence), percent(accuracy),
          signed(confidence - accuracy), confidence < low || confidence > high ? "yes" : "no",
        ])),
      ],
    });
  }

  // Lines over a common axis: risk and coverage, ROC, epochs

  function lines(host, { title, note = "", label, x, y, curves, at, words, extra = [], table, legend, aspect = 0.62, below = null }) {
    return figure(host, {
      title,
      note,
      legend,
      table,
      draw: (width) => {
        const area = box(width, Math.min(320, (width - 58) * aspect));
        const root = canvas(width, area.bottom + 42, label);
        const sx = scaled(x.from, x.to, area.left, area.right);
        const sy = scaled(y.from, y.to, area.bottom, area.top);
        axes(root, area, { at: sx, ticks: ticks(x.from, x.to, Math.max(2, Math.floor(area.width / 55))), text: x.text, name: x.name }, { at: sy, ticks: ticks(y.from, y.to, 5), text: y.text, name: y.name });
        if (below) below(root, area, sx, sy);
        for (const [kind, points] of [...extra, ...curves]) {
          for (const part of unbroken(points)) root.append(shape("path", { class: kind, d: path(part.map(([a, b]) => [sx(a), sy(b)])) }));
        }
        root.append(shape("path", { class: "frame", d: `M${area.left} ${area.top}V${area.bottom}H${area.right}` }));
        const places = at(area.width);
        places.forEach((place, number) => {
          const here = sx(place);
          const from = number ? (here + sx(places[number - 1])) / 2 : area.left;
          const to = number < places.length - 1 ? (here + sx(places[number + 1])) / 2 : area.right;
          const found = curves.map(([kind, points, name]) => [kind, name, nearest(points, place)]);
          const dots = found.filter(([, , point]) => point).map(([kind, , point]) => shape("circle", { class: `dot ${kind}`, cx: sx(point[0]), cy: sy(point[1]), r: 4 }));
          stop(root, { x: from, width: Math.max(1, to - from), y: area.top, height: area.height }, words(place, found), dots);
        });
        return root;
      },
    });
  }

  function unbroken(points) {
    const found = [[]];
    for (const point of points) {
      if (point[1] === null) found.push([]);
      else found[found.length - 1].push(point);
    }
    return found.filter((part) => part.length);
  }

  function nearest(points, place) {
    let best = null;
    for (const point of points) {
      if (point[1] !== null && (best === null || Math.abs(point[0] - place) < Math.abs(best[0] - place))) best = point;
    }
    return best;
  }

  const pairs = (first, second) => first.map((value, place) => [value, second[place]]);

  // Risk and coverage

  const hidden = new Set();

  function riskCurves() {
    const several = data.models.length > 1;
    const found = [];
    data.models.forEach((one, place) => {
      one.states.forEach((state, number) => {
        if (!state.risk || (number > 0 && place !== chosen.model)) return;
        const name = several ? `${one.name}, ${number ? "after " : ""}${state.name}` : number ? `after ${state.name}` : state.name;
        found.push({ key: `${place}/${number}`, name, risk: state.risk });
      });
    });
    return found.map((one, place) => ({ ...one, kind: `line line-${place % 6}` }));
  }

  function setUpRisk() {
    const host = find("risk-lines");
    const legend = host.querySelector("legend");
    const labels = riskCurves().map(({ key, name, kind }) => {
      const input = element("input", { type: "checkbox", value: key, checked: !hidden.has(key) });
      input.addEventListener("change", () => {
        if (input.checked) hidden.delete(key);
        else hidden.add(key);
        drawRisk();
      });
      const sign = lineKey(kind);
      sign.setAttribute("width", 26);
      sign.setAttribute("height", 13);
      return element("label", {}, input, sign, word(name));
    });
    replaced(host, legend, ...labels);
    drawRisk();
  }

  function drawRisk() {
    const curves = riskCurves().filter(({ key }) => !hidden.has(key));
    const own = model().states[0].risk;
    const most = Math.max(0.001, ...curves.flatMap(({ risk }) => risk.risk.filter((_, place) => risk.coverage[place] >= 0.02)), ...(own ? own.best : []));
    const top = Math.min(1, most * 1.08);
    const held = curves.map(({ kind, name, risk }) => [kind, pairs(risk.coverage, risk.risk).map(([a, b]) => [a, Math.min(b, top)]), name]);
    const tenths = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1];
    const value = (risk, place) => nearest(pairs(risk.coverage, risk.risk), place)[1];
    lines(find("risk-figure"), {
      title: "Share of wrong answers over coverage",
      note: own ? `AURC ${shown(model().states[0].results.aurc)}.` : "",
      label: "Risk over coverage",
      x: { from: 0, to: 1, text: tick, name: "samples answered, most confident first" },
      y: { from: 0, to: top, text: tick, name: "wrong among them" },
      curves: held,
      extra: own ? [["best", pairs(own.coverage, own.best)]] : [],
      at: () => tenths,
      words: (place) => [
        `${percent(place, 0)} answered`,
        ...curves.map(({ name, risk }) => `${name}: ${percent(value(risk, place), 2)} wrong`),
        ...(own ? [`best possible: ${percent(value({ coverage: own.coverage, risk: own.best }, place), 2)}`] : []),
      ],
      legend: [...curves.map(({ kind, name }) => [lineKey(kind), name]), ...(own ? [[lineKey("best"), "best possible"]] : [])],
      table: () => [
        ["Answered", ...curves.map(({ name }) => name), "Best possible"],
        tenths.map((place) => [
          percent(place, 0), ...curves.map(({ risk }) => percent(value(risk, place), 2)),
          own ? percent(value({ coverage: own.coverage, risk: own.best }, place), 2) : "–",
        ]),
      ],
    });
  }

  // Foreign data

  const foreign = { set: 0, score: 0 };
  const scoreName = (name) => name.replaceAll("_", " ");

  function setUpForeign() {
    const held = model().ood;
    const section = find("ood");
    for (const part of section.querySelectorAll(":scope > :not(h2):not(.missing)")) part.hidden = !held;
    missing(section, held, "No foreign data was given for this model.");
    if (!held) return;
    Object.assign(foreign, { set: 0, score: 0 });
    options(find("ood-set"), held.sets.map((one) => one.name), 0);
    options(find("ood-score"), held.sets[0].scores.map((one) => scoreName(one.name)), 0);
    drawForeign();
  }

  function missing(section, held, text) {
    const old = section.querySelector(".missing");
    if (old) old.remove();
    if (!held) section.append(element("p", { class: "note missing" }, text));
  }

  function options(select, names, current) {
    replaced(select, ...names.map((name, place) => {
      const made = element("option", { value: place }, name);
      made.selected = place === current;
      return made;
    }));
  }

  function drawForeign() {
    const set = model().ood.sets[foreign.set];
    const score = set.scores[foreign.score];
    const names = score.numbers.map((one) => one.name);
    find("ood-numbers").textContent = score.numbers.map((one) => `${one.name} ${shown(one)}`).join("; ") + ". AUPR is the average precision.";
    const rows = model().ood.sets.flatMap((one) => one.scores.map((held) => [one.name, scoreName(held.name), ...held.numbers.map(shown)]));
    const region = element("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "All scores, can be scrolled sideways" }, tableOf(["Data set", "Score", ...names], rows));
    replaced(find("ood-table"), element("details", {}, element("summary", {}, "All data sets and scores"), region));
    if (!score.roc) {
      replaced(find("ood-roc"), element("p", { class: "note" }, "The predictions on this set were not given, only its numbers."));
      return replaced(find("ood-histogram"));
    }
    const roc = pairs(score.roc.false, score.roc.true);
    const tenths = [0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1];
    const reached = (place) => Math.max(...roc.filter(([a]) => a <= place + 1e-12).map(([, b]) => b));
    lines(find("ood-roc"), {
      title: `ROC of ${scoreName(score.name)} on ${set.name}`,
      note: `AUROC ${shown(score.numbers[0])}.`,
      label: `ROC curve of ${scoreName(score.name)}`,
      aspect: 0.9,
      x: { from: 0, to: 1, text: short, name: "known samples taken for foreign" },
      y: { from: 0, to: 1, text: (v) => v.toFixed(1), name: "foreign samples found" },
      curves: [["line line-0", roc, "score"]],
      extra: [["ideal", [[0, 0], [1, 1]]]],
      at: () => tenths,
      words: (place) => [`${percent(place, 0)} of the known taken for foreign`, `${percent(reached(place))} of the foreign found`],
      legend: [[lineKey("line line-0"), scoreName(score.name)], [lineKey("ideal"), "guessing"]],
      table: () => [["Known taken for foreign", "Foreign found"], tenths.map((place) => [percent(place, 0), percent(reached(place))])],
    });
    const { edges, known, foreign: strange } = score.histogram;
    const most = Math.max(...known, ...strange);
    const kept = known.map((_, place) => place);
    const spanOf = (place) => `${place ? "" : "up to "}${place ? `${short(edges[place])} ` : ""}${place === known.length - 1 ? "and more" : `${place ? "to " : ""}${short(edges[place + 1])}`}`;
    figure(find("ood-histogram"), {
      title: `${score.quantity} of ID and OOD samples`,
      note: "The outermost bars hold what lies beyond them.",
      draw: (width) => {
        const area = box(width, Math.min(320, (width - 58) * 0.9));
        const root = canvas(width, area.bottom + 42, `Histograms of ${score.quantity}`);
        const x = scaled(edges[0], edges[edges.length - 1], area.left, area.right);
        const y = scaled(0, most, area.bottom, area.top);
        const marks = ticks(edges[0], edges[edges.length - 1], Math.max(2, Math.floor(area.width / 80)));
        axes(root, area, { at: x, ticks: marks, text: short, name: `${score.quantity} (higher: more likely OOD)` }, { at: y, ticks: ticks(0, most, 4), text: tick, name: "share of its kind" });
        for (const [kind, shares] of [["0", known], ["1", strange]]) {
          shares.forEach((share, place) => {
            root.append(shape("rect", { class: `fill-${kind}`, x: x(edges[place]), width: Math.max(1, x(edges[place + 1]) - x(edges[place])), y: y(share), height: area.bottom - y(share) }));
          });
          const outline = shares.flatMap((share, place) => [[x(edges[place]), y(share)], [x(edges[place + 1]), y(share)]]);
          root.append(shape("path", { class: `line line-${kind}`, d: path(outline) }));
        }
        for (const place of kept) {
          stop(root, { x: x(edges[place]), width: Math.max(1, x(edges[place + 1]) - x(edges[place])), y: area.top, height: area.height }, [
            spanOf(place), `${percent(known[place])} of the known samples`, `${percent(strange[place])} of the foreign samples`,
          ]);
        }
        return root;
      },
      legend: [[boxKey({ class: "fill-0" }), "known"], [boxKey({ class: "fill-1" }), set.name]],
      table: () => [["Score", "Known", "Foreign"], kept.map((place) => [spanOf(place), percent(known[place], 2), percent(strange[place], 2)])],
    });
    return null;
  }

  // Feature norms

  function drawNorms() {
    const held = model().norms;
    const section = find("norms");
    missing(section, held, "The predictions of this model have no features.");
    if (!held) {
      replaced(find("norm-histogram"));
      replaced(find("norm-groups"));
      return;
    }
    const { edges, right, wrong } = held;
    const total = [sum(right) || 1, sum(wrong) || 1];
    const shares = [right.map((v) => v / total[0]), wrong.map((v) => v / total[1])];
    const most = Math.max(...shares[0], ...shares[1]);
    figure(find("norm-histogram"), {
      title: "Norms of right and wrong answers",
      note: `Mean norm ${short(held.mean)}, deviation ${short(held.deviation)}. The outermost bars hold what lies beyond them.`,
      draw: (width) => {
        const area = box(width, Math.min(280, (width - 58) * 0.7));
        const root = canvas(width, area.bottom + 42, "Histograms of the normalised feature norm");
        const x = scaled(edges[0], edges[edges.length - 1], area.left, area.right);
        const y = scaled(0, most, area.bottom, area.top);
        axes(root, area, { at: x, ticks: ticks(edges[0], edges[edges.length - 1], 6), text: short, name: "γ, norm in deviations" }, { at: y, ticks: ticks(0, most, 4), text: tick, name: "share of its kind" });
        shares.forEach((values, kind) => {
          const outline = values.flatMap((share, place) => [[x(edges[place]), y(share)], [x(edges[place + 1]), y(share)]]);
          const ground = [[x(edges[edges.length - 1]), area.bottom], [x(edges[0]), area.bottom]];
          root.append(shape("path", { class: kind ? "wrong" : "right", "fill-opacity": 0.25, d: `${path([...outline, ...ground])}Z` }));
          root.append(shape("path", { class: `line ${kind ? "line-1" : "line-2"}`, d: path(outline) }));
        });
        right.forEach((_, place) => {
          stop(root, { x: x(edges[place]), width: Math.max(1, x(edges[place + 1]) - x(edges[place])), y: area.top, height: area.height }, [
            `γ ${short(edges[place])} to ${short(edges[place + 1])}`, `${whole(right[place])} right (${percent(shares[0][place])})`, `${whole(wrong[place])} wrong (${percent(shares[1][place])})`,
          ]);
        });
        return root;
      },
      legend: [[lineKey("line line-2"), "right answers"], [lineKey("line line-1"), "wrong answers"]],
      table: () => [["γ", "Right", "Wrong"], right.map((_, place) => [`${short(edges[place])} to ${short(edges[place + 1])}`, whole(right[place]), whole(wrong[place])])],
    });
    const said = held.groups.map(([, gamma, confidence]) => [gamma, confidence]);
    const kept = held.groups.map(([, gamma, , accuracy]) => [gamma, accuracy]);
    const low = Math.max(0, Math.min(...said.map((p) => p[1]), ...kept.map((p) => p[1])) - 0.05);
    const middle = held.groups.map((row) => row[1]);
    lines(find("norm-groups"), {
      title: "Confidence and accuracy by norm",
      note: "Tenths of the samples, from the shortest features to the longest.",
      label: "Mean confidence and accuracy over the feature norm",
      aspect: 0.7,
      x: { from: Math.min(...middle), to: Math.max(...middle), text: short, name: "γ, norm in deviations" },
      y: { from: low, to: 1, text: tick, name: "share" },
      curves: [["line line-0", said, "mean confidence"], ["line line-2", kept, "right"]],
      at: () => middle,
      words: (place, found) => [`γ ${place.toFixed(2)}`, ...found.map(([, name, point]) => `${name} ${percent(point[1])}`)],
      legend: [[lineKey("line line-0"), "mean confidence"], [lineKey("line line-2"), "share that is right"]],
      table: () => [["γ", "Samples", "Mean confidence", "Right"], held.groups.map(([count, gamma, confidence, accuracy]) => [gamma.toFixed(2), whole(count), percent(confidence), percent(accuracy)])],
    });
  }

  // Training

  function drawTraining() {
    const held = model().training;
    const section = find("training");
    const places = ["training-curves", "training-gate", "training-ratio", "training-alpha"].map(find);
    missing(section, held, "No training log was given for this model.");
    for (const place of places) replaced(place);
    find("training-lead").hidden = !held;
    if (!held) return;
    const epochs = held.epoch;
    const x = { from: epochs[0], to: Math.max(epochs[0] + 1, epochs[epochs.length - 1]), text: (v) => (Number.isInteger(v) ? String(v) : ""), name: "epoch" };
    const at = () => {
      const every = Math.ceil(epochs.length / 24);
      return epochs.filter((_, place) => place % every === 0 || place === epochs.length - 1);
    };
    const shares = (host, title, label, curves, note = "") => lines(host, {
      title, note, label, x, at,
      y: { from: 0, to: Math.max(0.01, ...curves.flatMap(([, points]) => points.map((p) => p[1] ?? 0))) * 1.05, text: tick, name: null },
      curves,
      words: (place, found) => [`epoch ${place}`, ...found.filter(([, , point]) => point).map(([, name, point]) => `${name} ${percent(point[1])}`)],
      legend: curves.map(([kind, , name]) => [lineKey(kind), name]),
      table: () => [["Epoch", ...curves.map((one) => one[2])], epochs.map((epoch, place) => [epoch, ...curves.map(([, points]) => (points[place][1] === null ? "–" : percent(points[place][1])))])],
    });
    shares(places[0], "Validation", "Accuracy and ECE over epochs", [
      ["line line-2", pairs(epochs, held.accuracy), "accuracy"], ["line line-1", pairs(epochs, held.ece), "ECE"],
    ]);
    if (held.feedback) drawFeedback(places.slice(1, 3), held, x, at);
    if (!held.gate) return;
    shares(places[1], "Gate", "State of the gate over epochs", [
      ["line line-0", pairs(epochs, held.gate.positive), "gate at +1"], ["line line-1", pairs(epochs, held.gate.flip_rate), "flipped since the epoch before"],
      ["line line-2", pairs(epochs, held.gate.against_gamma), "against the sign of γ"],
    ], "Where it is against γ nearly always, the gate only lowers the training loss.");
    const ratio = pairs(epochs, held.gate.alpha_ratio);
    lines(places[2], {
      title: "Mean smoothing",
      note: "Mean of αᵢ over the samples of an epoch, as a multiple of α; label smoothing alone is 1.",
      label: "Mean of alpha over epochs",
      x, at,
      y: { from: 0, to: Math.max(1.05, ...ratio.map((p) => p[1] ?? 0)), text: short, name: "mean αᵢ / α" },
      curves: [["line line-3", ratio, "mean αᵢ / α"]],
      extra: [["ideal", [[x.from, 1], [x.to, 1]]]],
      words: (place, found) => [`epoch ${place}`, `mean αᵢ / α ${found[0][2] ? short(found[0][2][1]) : "–"}`],
      legend: [[lineKey("line line-3"), "mean αᵢ / α"], [lineKey("ideal"), "α"]],
      table: () => [["Epoch", "Mean αᵢ / α"], ratio.map(([epoch, value]) => [epoch, value === null ? "–" : short(value)])],
    });
    if (held.gate.gamma) drawAlpha(places[3], held);
  }

  // Strengths of a loss with feedback, and the calibration gaps that they follow: up to five of its bins.
  function drawFeedback(hosts, held, x, at) {
    const epochs = held.epoch;
    const bins = held.feedback.strengths[0].length;
    const chosen = [...new Set([0, 1, 2, 3, 4].map((k) => Math.round((k * (bins - 1)) / 4)))];
    const name = (bin) => (bins === 1 ? "all samples" : `bin ${bin + 1} of ${bins}`);
    const draw = (host, values, title, axis, note, text) => {
      const curves = chosen.map((bin, place) => [`line line-${place}`, pairs(epochs, values.map((row) => row[bin])), name(bin)]);
      const all = curves.flatMap(([, points]) => points.map((p) => p[1] ?? 0));
      const to = Math.max(0.01, ...all) * 1.05;
      lines(host, {
        title, note, x, at, curves,
        label: `${title} over epochs`,
        y: { from: Math.min(0, ...all) * 1.05, to, text: tick, name: axis },
        words: (epoch, found) => [`epoch ${epoch}`, ...found.filter(([, , point]) => point).map(([, word, point]) => `${word} ${text(point[1])}`)],
        legend: curves.map(([kind, , word]) => [lineKey(kind), word]),
        table: () => [["Epoch", ...curves.map((one) => one[2])], epochs.map((epoch, place) => [epoch, ...curves.map(([, points]) => (points[place][1] === null ? "–" : text(points[place][1])))])],
      });
    };
    draw(hosts[0], held.feedback.strengths, "Smoothing strength", "strength", "Weight of the previous prediction in the target, by bin from low to high values of the indicator.", percent);
    draw(hosts[1], held.feedback.gaps, "Calibration gap", "confidence − accuracy", "Mean confidence minus accuracy of each bin on held-out data. Above zero: over-confident; the strength of the bin is raised.", percent);
  }

  function drawAlpha(host, held) {
    const { edges, counts, ends } = held.gate.gamma;
    const total = sum(counts) || 1;
    // The outermost counts lie beyond the edges; they are drawn as one more bin on either side.
    const most = Math.max(...counts) / total;
    const beta = held.beta;
    const curve = (mode) => held.gate.gamma.curve.map((row) => [row[0], row[mode]]);
    const curves = beta === null ? [] : [["line line-0", curve(1), "αᵢ / α, gate at +1"], ["line line-1", curve(2), "αᵢ / α, gate at −1"]];
    const middle = counts.map((_, place) => (ends[place] + ends[place + 1]) / 2);
    const spanOf = (place) => (place === 0 ? `γ below ${short(edges[0])}` : place === counts.length - 1 ? `γ from ${short(edges[edges.length - 1])}` : `γ ${short(ends[place])} to ${short(ends[place + 1])}`);
    const alpha = (place, mode) => short(held.gate.gamma.middle[place][mode]);
    lines(host, {
      title: "Smoothing over the indicator",
      note: `Bars: how γ was spread in the last epoch.${beta === null ? "" : ` Lines: αᵢ as a multiple of α, with β = ${short(beta)}.`}`,
      label: "Smoothing over gamma, and the histogram of gamma",
      x: { from: ends[0], to: ends[ends.length - 1], text: short, name: "γ" },
      y: { from: 0, to: 2, text: (v) => (beta === null ? "" : short(v)), name: beta === null ? null : "αᵢ / α" },
      curves,
      at: () => middle,
      below: (root, area, sx) => {
        counts.forEach((count, place) => {
          const tall = (count / total / most) * area.height * 0.95;
          root.append(shape("rect", { class: "density", x: sx(ends[place]) + 0.5, width: Math.max(1, sx(ends[place + 1]) - sx(ends[place]) - 1), y: area.bottom - tall, height: tall }));
        });
      },
      words: (place) => {
        const number = middle.indexOf(place);
        const both = beta === null ? [] : [`αᵢ / α ${alpha(number, 1)} at +1, ${alpha(number, 2)} at −1`];
        return [spanOf(number), `${percent(counts[number] / total)} of the samples`, ...both];
      },
      legend: [[boxKey({ class: "density" }), "share of samples"], ...curves.map(([kind, , name]) => [lineKey(kind), name])],
      table: () => [
        ["γ", "Share of samples", ...(beta === null ? [] : ["αᵢ / α at +1", "αᵢ / α at −1"])],
        counts.map((count, place) => [spanOf(place), percent(count / total, 2), ...(beta === null ? [] : [alpha(place, 1), alpha(place, 2)])]),
      ],
    });
  }

  // Samples

  let sampleKind = "over";

  function drawSamples() {
    const held = model().samples;
    const found = held ? held[sampleKind] : [];
    const list = find("sample-list");
    if (!found.length) {
      const why = sampleKind === "over" ? "No answer is wrong." : "No right answer is unsure.";
      return replaced(list, element("li", { class: "note" }, held ? why : "No predictions were given for this model."));
    }
    return replaced(list, ...found.map(sampleCard));
  }

  function sampleCard(sample) {
    const lines = [];
    const add = (name, ...children) => lines.push(element("div", {}, element("dt", {}, name), element("dd", {}, ...children)));
    const name = (index) => word(className(index));
    add("answer", name(sample.answer), ` (${probability(sample.confidence)})`);
    const share = sample.share === null ? [] : [`${percent(sample.share, 0)} of the label`];
    const truth = [...(sample.truth === null ? [] : [probability(sample.truth)]), ...share].join(", ");
    add("truth", name(sample.label), truth ? ` (${truth})` : "");
    const others = sample.likeliest.filter(([index]) => index !== sample.answer && index !== sample.label);
    if (others.length) add("then", name(others[0][0]), ` (${probability(others[0][1])})`);
    add("row", whole(sample.row) + (sample.index === null ? "" : `, index ${whole(sample.index)}`));
    if (sample.id !== undefined) add("id", word(sample.id));
    if (sample.path !== undefined) add("path", word(sample.path));
    const source = data.pictures[sample.picture];
    const alternative = `Sample ${sample.row}: answer ${className(sample.answer).slice(0, 60)}, truth ${className(sample.label).slice(0, 60)}`;
    const picture = source ? element("img", { src: source, alt: alternative, width: 96, height: 96, class: source.startsWith("data:image/jpeg") ? "photo" : null }) : null;
    return element("li", {}, picture, element("dl", {}, ...lines));
  }

  // Several models

  function drawComparison() {
    const held = data.comparison;
    const host = find("comparison-tests");
    if (!held) {
      replaced(host, element("p", { class: "note" }, "Paired tests need the predictions of every model."));
    } else {
      const name = (place) => data.models[place].name;
      const head = [["Metric", "words"], ["First", "words"], ["Second", "words"], ["First minus second", null], ["p", null], ["Verdict", "words"]];
      const rows = held.tests.map((test) => {
        if (test.why) return element("tr", {}, element("th", { scope: "row" }, "–"), element("td", { class: "words" }, word(name(test.first))), element("td", { class: "words" }, word(name(test.second))), element("td", { class: "words", colspan: 3 }, `no paired test: ${test.why}`));
        const digits = test.percent ? 2 : 4;
        const scale = test.percent ? 100 : 1;
        const plus = (value) => `${value < 0 ? "−" : "+"}${fixed(Math.abs(scale * value), digits)}`;
        const verdict = test.better === null ? ["no difference is shown"] : [word(name(test.better ? test.second : test.first)), " is better"];
        return element("tr", {},
          element("th", { scope: "row" }, test.percent ? `${test.name}, points` : test.name),
          element("td", { class: "words" }, word(name(test.first))),
          element("td", { class: "words" }, word(name(test.second))),
          element("td", {}, plus(test.difference), element("span", { class: "interval" }, `[${plus(test.low)}, ${plus(test.high)}]`)),
          element("td", {}, test.p < 0.001 ? "< 0.001" : test.p.toFixed(3)),
          element("td", { class: "words" }, ...verdict));
      });
      const table = element("table", {},
        element("caption", {}, `Paired bootstrap, ${percentOf(data.level)} intervals`),
        element("thead", {}, element("tr", {}, ...head.map(([text, kind]) => element("th", { scope: "col", class: kind }, text)))),
        element("tbody", {}, ...rows));
      replaced(host, element("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "Paired tests, can be scrolled sideways" }, table));
    }
    const places = data.models.map((one) => {
      const place = element("div");
      return [place, one];
    });
    replaced(find("comparison-diagrams"), ...places.map(([place]) => place));
    for (const [place, one] of places) {
      reliability(place, one.name, one.states[0].diagrams.width, "width", { note: errorNote(one.states[0], "width"), small: true });
    }
  }

  // The page

  function drawModel() {
    setUpReliability();
    if (find("confidences")) setUpConfidences();
    if (find("classes")) {
      const there = Boolean(model().class_table);
      for (const id of ["classes", "map"]) {
        for (const part of find(id).querySelectorAll(":scope > :not(h2):not(.missing)")) part.hidden = !there;
        missing(find(id), there, "No predictions were given for this model.");
      }
      setUpClasses();
      Object.assign(map, { page: 0 });
      drawMap();
    }
    if (find("selective")) setUpRisk();
    if (find("ood")) setUpForeign();
    if (find("norms")) drawNorms();
    if (find("training")) drawTraining();
    if (find("samples")) drawSamples();
  }

  function on(id, event, action) {
    const place = find(id);
    if (place) place.addEventListener(event, () => action(place));
  }

  function onRadio(id, action) {
    const place = find(id);
    if (place) place.addEventListener("change", (event) => action(event.target.value));
  }

  on("model", "change", (select) => {
    chosen.model = Number(select.value);
    drawModel();
  });
  on("theme", "change", (select) => {
    if (select.value === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", select.value);
  });
  onRadio("bins", (value) => {
    chosen.bins = value;
    drawReliability();
  });
  onRadio("confidence-scale", (value) => {
    chosen.scale = value;
    drawConfidences();
  });
  on("class-search", "input", () => {
    classes.page = 0;
    searchClasses();
  });
  for (const [id, by] of [["class-before", -1], ["class-after", 1]]) {
    on(id, "click", () => {
      classes.page += by;
      pageClasses();
    });
  }
  onRadio("class-kind", (value) => {
    classes.kind = value;
    drawClass();
  });
  on("map-order", "change", (select) => {
    Object.assign(map, { order: select.value, page: 0 });
    drawMap();
  });
  for (const [id, by] of [["map-before", -1], ["map-after", 1]]) {
    on(id, "click", () => {
      map.page += by;
      drawMap();
    });
  }
  on("ood-set", "change", (select) => {
    foreign.set = Number(select.value);
    drawForeign();
  });
  on("ood-score", "change", (select) => {
    foreign.score = Number(select.value);
    drawForeign();
  });
  onRadio("sample-kind", (value) => {
    sampleKind = value;
    drawSamples();
  });

  // In a narrow window the list of sections is folded; in a wide one it stands beside the page.
  const narrow = window.matchMedia("(max-width: 63.99rem)");
  const fold = () => {
    find("contents").open = !narrow.matches;
  };
  narrow.addEventListener("change", fold);
  fold();

  // Where the reader is, in the list of sections
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);

  // What is folded away is printed too, but for tables that repeat pictures.
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not(.as-table)")) details.open = true;
  });

  if (find("comparison")) drawComparison();
  drawModel();
  document.documentElement.dataset.ready = "true";
})();
