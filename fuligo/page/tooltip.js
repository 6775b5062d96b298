// One tooltip for the page: `withTooltip(node, () => [lines])`. The page's text has the same information, for users who do not hover.

const tooltip = document.getElementById("tooltip");

function showTooltip(lines, x, y) {
  tooltip.replaceChildren(...lines.filter(Boolean).map((line, index) => element("div", { class: index === 0 ? "tip-title" : "" }, line)));
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = Math.max(8, Math.min(x - width / 2, document.documentElement.clientWidth - width - 8));
  const above = y - height - 14;
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${above < 8 ? y + 20 : above}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

function withTooltip(node, lines) {
  node.addEventListener("pointermove", (event) => event.pointerType === "mouse" && showTooltip(lines(), event.clientX, event.clientY));
  node.addEventListener("pointerleave", hideTooltip);
  return node;
}

addEventListener("scroll", hideTooltip, { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTooltip());
