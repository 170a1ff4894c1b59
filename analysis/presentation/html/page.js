"use strict";
(() => {
  const byId = (id) => document.getElementById(id);

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

  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((element) => { element.open = true; });
  });

  // --- labels of marks: at the pointer at once, in place of the browser's own, which come late -------------------

  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  document.querySelectorAll(".plot title").forEach((title) => {
    title.parentElement.dataset.label = title.textContent;
    title.remove();
  });
  document.addEventListener("pointerover", (event) => {
    const mark = event.target.closest(".plot [data-label]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.label;
    tip.style.left = tip.style.top = "0"; // where it has its full width
    const { width, height } = tip.getBoundingClientRect();
    const right = document.documentElement.clientWidth - width - 8;
    const above = event.clientY - height - 12;
    tip.style.left = `${Math.max(8, Math.min(right, event.clientX + 12))}px`;
    tip.style.top = `${above > 8 ? above : event.clientY + 16}px`;
  });
  const hide = () => { tip.hidden = true; };
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.documentElement.addEventListener("pointerleave", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
