"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const read = (id) => JSON.parse(byId(id).textContent);
  const colours = read("colours");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => document.documentElement.clientWidth < 560;

  // --- settings ------------------------------------------------------------------------------------------------

  byId("copy")?.addEventListener("click", async () => {
    let said = "Copied";
    try {
      await navigator.clipboard.writeText(`${byId("settings-text").textContent}\n`);
    } catch {
      said = "Not copied: select the lines and copy them by hand";
    }
    byId("copied").textContent = said;
  });

  // --- folded sections -----------------------------------------------------------------------------------------

  const unfold = () => document.querySelector(`${location.hash || "main"} > details`)?.setAttribute("open", "");
  window.addEventListener("hashchange", unfold);
  unfold();

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

  let plotly = "";
  async function unpack() {
    const packed = Uint8Array.from(atob(byId("plotly").textContent), (letter) => letter.charCodeAt(0));
    plotly = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    byId("plotly").remove();
  }

  function loadPlotly() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = plotly;
    document.body.append(script);
  }

  const plots = [...document.querySelectorAll(".plot")];
  const see = (element) => { loadPlotly(); if (!drawn.has(element)) draw(element); };

  function begin() {
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
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((element) => { element.open = true; });
    if (plotly) plots.forEach(see);
  });
  // After the first picture of the page is on the screen and the whole file is read.
  const start = () => requestAnimationFrame(() => setTimeout(() => unpack().then(begin), 0));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
