"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const read = (id) => JSON.parse(byId(id).textContent);
  const colours = read("colours");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => document.documentElement.clientWidth < 560;

  // --- settings ------------------------------------------------------------------------------------------------

  async function copyText(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // No clipboard here (an insecure context, a refusal): the old way, through a selection.
      const area = document.createElement("textarea");
      area.value = text;
      area.setAttribute("readonly", "");
      area.style.cssText = "position:fixed;top:0;left:-999rem";
      document.body.append(area);
      const before = document.activeElement;
      area.select();
      let done = false;
      try { done = document.execCommand("copy"); } catch { /* said below */ }
      area.remove();
      if (before instanceof HTMLElement) before.focus();
      return done;
    }
  }

  byId("copy")?.addEventListener("click", async () => {
    const done = await copyText(`${byId("settings-text").textContent}\n`);
    byId("copied").textContent = done ? "Copied" : "Not copied: select the lines and copy them by hand";
  });

  // --- table ---------------------------------------------------------------------------------------------------

  const ROWS_A_PAGE = 50;

  function makeTable(table, { columns, rows }) {
    const chosen = table.dataset.chosen;
    const words = rows.map((row) => row.map((value) => String(value ?? "")).join("\n").toLowerCase());
    const state = { column: -1, direction: 1, page: 0, order: rows.map((_, place) => place) };

    const shown = (value, column) => {
      if (value === null || value === undefined) return "";
      if (column.kind !== "number" || column.digits === null) return String(value);
      const text = value.toFixed(column.digits);
      return Number(text) === 0 ? text.replace("-", "") : text;
    };

    // What holds nothing comes last, whichever way the column is sorted; equal rows stay in the order of trials.
    function compare(a, b) {
      const first = rows[a][state.column], second = rows[b][state.column];
      const without = (value) => value === null || value === "";
      if (without(first) || without(second)) return Number(without(first)) - Number(without(second)) || a - b;
      const order = typeof first === "number" && typeof second === "number"
        ? first - second : String(first).localeCompare(String(second), undefined, { numeric: true });
      return state.direction * order || a - b;
    }

    const wide = (label) => label.toLowerCase().replace(/[ %.]/g, "");
    function condition(word) {
      const found = /^(.+?)(>=|<=|>|<|=)(-?[\d.]+)$/.exec(word);
      const column = found ? columns.findIndex((c) => [wide(c.label), c.key.toLowerCase()].includes(wide(found[1]))
        || c.key.toLowerCase() === found[1]) : -1;
      if (column < 0 || columns[column].kind !== "number") return (place) => words[place].includes(word);
      const limit = Number(found[3]);
      const holds = { ">": (v) => v > limit, "<": (v) => v < limit, ">=": (v) => v >= limit, "<=": (v) => v <= limit,
        "=": (v) => v === limit }[found[2]];
      return (place) => rows[place][column] !== null && holds(rows[place][column]);
    }

    function arrange() {
      const conditions = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
      state.order = rows.map((_, place) => place).filter((place) => conditions.every((holds) => holds(place)));
      if (state.column >= 0) state.order.sort(compare);
      state.page = 0;
      draw();
    }

    function draw() {
      const begin = state.page * ROWS_A_PAGE;
      const places = state.order.slice(begin, begin + ROWS_A_PAGE);
      const body = document.createElement("tbody");
      for (const place of places) {
        const line = body.insertRow();
        if (chosen !== undefined && String(rows[place][0]) === chosen) line.className = "chosen";
        columns.forEach((column, i) => {
          const cell = line.insertCell();
          cell.textContent = shown(rows[place][i], column);
          cell.className = column.kind === "number" ? "number" : column.key === "error" ? "long" : "";
        });
      }
      table.tBodies[0].replaceWith(body);
      const of = state.order.length === rows.length ? `${rows.length} trials` : `${state.order.length} of ${rows.length} trials`;
      byId("page-status").textContent = places.length ? `${begin + 1} to ${begin + places.length} of ${of}` : "no trial matches";
      byId("previous").disabled = state.page === 0;
      byId("next").disabled = begin + ROWS_A_PAGE >= state.order.length;
    }

    function sortBy(column) {
      const best = columns[column].kind === "number" && !["trial", "rank"].includes(columns[column].key) ? -1 : 1;
      state.direction = state.column === column ? -state.direction : best;
      state.column = column;
      [...table.tHead.rows[0].cells].forEach((cell, i) => {
        cell.setAttribute("aria-sort", i !== column ? "none" : state.direction > 0 ? "ascending" : "descending");
      });
      arrange();
    }

    const head = table.tHead.insertRow();
    columns.forEach((column, i) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.setAttribute("aria-sort", "none");
      if (column.kind === "number") cell.className = "number";
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = column.label;
      button.title = column.title;
      button.addEventListener("click", () => sortBy(i));
      cell.append(button);
      head.append(cell);
    });
    const turn = (pages) => () => { state.page += pages; draw(); };
    byId("previous").addEventListener("click", turn(-1));
    byId("next").addEventListener("click", turn(1));
    byId("filter").addEventListener("input", arrange);
    sortBy(columns.some((c) => c.key === "rank") ? 1 : 0);
  }

  const table = byId("trials-table");
  if (table) makeTable(table, read("table"));

  // --- plots ---------------------------------------------------------------------------------------------------

  const figures = read("figures");
  const drawn = new Set();

  function depth(place, stops) {
    const at = Math.min(1, Math.max(0, place)) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const part = (stop, i) => parseInt(stop.slice(1 + 2 * i, 3 + 2 * i), 16);
    const mixed = [0, 1, 2].map((i) => Math.round(part(stops[low], i) + (at - low) * (part(stops[low + 1], i) - part(stops[low], i))));
    return `rgb(${mixed.join(",")})`;
  }

  // Names of colours become the scheme's, under keys of colours alone: text of a study is never looked up.
  function painted(value, palette, key = "") {
    if (Array.isArray(value)) return value.map((item) => painted(item, palette, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, painted(item, palette, name)]));
    }
    if (typeof value !== "string" || !value.startsWith("@") || !/colou?r(scale)?$/.test(key)) return value;
    if (value === "@depth") return palette.depth.map((stop, i) => [i / (palette.depth.length - 1), stop]);
    if (value.startsWith("@depth:")) return depth(Number(value.slice(7)), palette.depth);
    return palette[value.slice(1)];
  }

  // On a phone a legend has a line of its own for each entry.
  const heightOf = (figure) => figure.height + (narrow() ? 16 * figure.data.filter((t) => t.name && t.showlegend !== false).length : 0);

  function layoutOf(figure, palette) {
    const small = narrow();
    const axis = (own = {}) => ({
      gridcolor: palette.line, zerolinecolor: palette.line, linecolor: palette.faint, tickcolor: palette.faint,
      automargin: true, ...own, title: { standoff: 8, font: { size: small ? 12 : 13 }, ...own.title },
    });
    const layout = painted(figure.layout, palette);
    return {
      ...layout,
      height: heightOf(figure),
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: small ? 11 : 13, color: palette.text },
      margin: { l: small ? 8 : 56, r: small ? 14 : 20, t: 16, b: 48, ...layout.margin },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
      hoverlabel: { bgcolor: palette.panel, bordercolor: palette.faint, align: "left", font: { color: palette.text } },
      hovermode: "closest",
      // A finger that drags over a plot means the page.
      dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis),
    };
  }

  function draw(element) {
    const figure = figures[element.dataset.figure];
    const palette = colours[dark.matches ? "dark" : "light"];
    // The one button writes the plot for a paper.
    const config = {
      responsive: true, doubleClick: "autosize", displaylogo: false, modeBarButtons: [["toImage"]],
      toImageButtonOptions: { format: "svg", filename: element.dataset.figure },
    };
    element.style.height = `${heightOf(figure)}px`;
    window.Plotly.react(element, painted(figure.data, palette), layoutOf(figure, palette), config);
    element.dataset.drawn = dark.matches ? "dark" : "light";
    drawn.add(element);
  }

  let loaded = false;
  function loadPlotly() {
    if (loaded) return;
    loaded = true;
    const script = document.createElement("script");
    script.textContent = byId("plotly").textContent;
    document.body.append(script);
    byId("plotly").remove();
  }

  const plots = [...document.querySelectorAll(".plot")];
  const see = (element) => { loadPlotly(); if (!drawn.has(element)) draw(element); };

  function begin() {
    if (!("IntersectionObserver" in window)) { plots.forEach(see); return; }
    const observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) { observer.unobserve(entry.target); see(entry.target); }
      }
    }, { rootMargin: "300px 0px" });
    plots.forEach((element) => observer.observe(element));
  }

  dark.addEventListener("change", () => drawn.forEach(draw));
  let wasNarrow = narrow();
  window.addEventListener("resize", () => {
    if (narrow() !== wasNarrow) { wasNarrow = narrow(); drawn.forEach(draw); }
  });
  window.addEventListener("beforeprint", () => plots.forEach(see));
  // After the first picture of the page is on the screen and the whole file is read.
  const start = () => requestAnimationFrame(() => setTimeout(begin, 0));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
