// The page is complete without this script; it adds a choice of policy to the load maps, and a tool tip.
(() => {
  const kinds = JSON.parse(document.getElementById("maps").textContent);
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  document.querySelectorAll("figure[data-panel]").forEach((figure) => {
    const maps = kinds[Number(figure.dataset.kind)];
    const image = figure.querySelector("image");
    let shown = maps.shown[Number(figure.dataset.panel)];

    const select = document.createElement("select");
    select.setAttribute("aria-label", "policy shown in this map");
    for (const name of Object.keys(maps.policies)) select.add(new Option(name, name, false, name === shown));
    select.addEventListener("change", () => {
      shown = select.value;
      image.setAttribute("href", maps.policies[shown].png);
      figure.querySelector(".most").textContent = maps.policies[shown].most;
    });
    figure.querySelector("figcaption b").replaceWith(select);

    image.addEventListener("mousemove", (event) => {
      const box = image.getBoundingClientRect();
      const column = Math.min(maps.columns - 1, Math.floor(((event.clientX - box.left) / box.width) * maps.columns));
      const row = Math.min(maps.layers.length - 1, Math.floor(((event.clientY - box.top) / box.height) * maps.layers.length));
      const level = atob(maps.policies[shown].levels).charCodeAt(row * maps.columns + column);
      tip.textContent = `layer ${maps.layers[row]}, ${maps.column} ${column}: ${((level * maps.top) / 255).toFixed(2)} x mean`;
      tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 190)}px`;
      tip.style.top = `${event.clientY + 14}px`;
      tip.hidden = false;
    });
    image.addEventListener("mouseleave", () => { tip.hidden = true; });
  });
})();
