// Every pair of colours the page shows now: [what, colour, background, the contrast WCAG AA asks for].
() => {
  const transparent = "rgba(0, 0, 0, 0)";
  const background = (element) => {
    for (; element; element = element.parentElement) {
      const { backgroundColor } = getComputedStyle(element);
      if (backgroundColor !== transparent) return backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const name = (element) => `${element.tagName.toLowerCase()}#${element.id}.${element.getAttribute("class") ?? ""}`;
  const pairs = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (!element.checkVisibility() || element.closest(":disabled")) continue;
    const style = getComputedStyle(element);
    const written = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (written) pairs.push([name(element), element.closest("svg") ? style.fill : style.color, background(element), 4.5]);
    if (element.matches("input, textarea")) pairs.push([`${name(element)}::placeholder`, getComputedStyle(element, "::placeholder").color, background(element), 4.5]);
    if (element.matches("input, textarea, select, button:not(.plain, .primary)")) pairs.push([`${name(element)} border`, style.borderTopColor, background(element.parentElement), 3]);
    if (element.matches("svg path:not(.grid)") && style.stroke !== "none") pairs.push([name(element), style.stroke, background(element), 3]);
    if (element.matches("#level")) pairs.push([name(element), style.backgroundColor, background(document.body), 3]);
  }
  return pairs;
}
