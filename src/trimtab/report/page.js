"use strict";

// Tabs: one panel at a time, by mouse, by arrow keys, by the address's #fragment.
for (const list of document.querySelectorAll('[role="tablist"]')) {
  const tabs = [...list.querySelectorAll('[role="tab"]')];
  const panelOf = (tab) => document.getElementById(tab.getAttribute("aria-controls"));

  function select(chosen) {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      panelOf(tab).hidden = tab !== chosen;
    }
    chosen.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  for (const tab of tabs) {
    tab.addEventListener("click", () => {
      select(tab);
      history.replaceState(null, "", "#" + panelOf(tab).id);
    });
  }
  list.addEventListener("keydown", (event) => {
    const place = tabs.indexOf(document.activeElement);
    const next = {
      ArrowRight: (place + 1) % tabs.length,
      ArrowLeft: (place - 1 + tabs.length) % tabs.length,
      Home: 0,
      End: tabs.length - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    tabs[next].focus();
    tabs[next].click();
  });
  const named = () => tabs.find((tab) => "#" + panelOf(tab).id === location.hash);
  addEventListener("hashchange", () => named() && select(named()));
  select(named() || tabs[0]);
}

// Charts: every plot holds its specification. Colours in it are variables of the page, so nothing is drawn twice.
function drawChart(plot, specification) {
  const options = { mode: "vega-lite", renderer: "svg", actions: false };
  return vegaEmbed(plot, specification, options).catch(console.error);
}

for (const plot of document.querySelectorAll(".plot")) {
  const source = plot.querySelector("script");
  if (source) drawChart(plot, JSON.parse(source.textContent));
}
