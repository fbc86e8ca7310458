// The picture of a league: who beats whom, how often the team wins against each slot, and its Elo.

const STRONGEST = 45; // % of a color in a cell, on which text can still be read

/** Return the background of a cell: blue for wins, orange for losses, the stronger the farther from 1/2. */
function shade(rate) {
  const share = Math.min(Math.abs(rate - 0.5) * 2, 1) * STRONGEST;
  return `color-mix(in srgb, ${color(rate < 0.5 ? 1 : 0)} ${share.toFixed(1)}%, var(--back))`;
}

function heatMap({ updates, strangers, rates }) {
  const names = [...updates.map(String), ...strangers.map((_, i) => `S${i}`), "present"], players = [...updates.map(updateText), ...strangers, "the present team"];
  const heatCell = (rate, i, j) => {
    if (rate === null) return make("td", { class: "number" }, i === j ? "" : "–");
    const percent = Math.round(100 * rate);
    return make("td", { style: `background: ${shade(rate)}`, title: `${players[i]} wins ${percent} % against ${players[j]}` }, String(percent));
  };
  const rows = rates.map((row, i) => make("tr", i === rates.length - 1 ? { class: "present" } : {},
    make("th", { scope: "row", title: players[i] }, names[i]), ...row.map((rate, j) => heatCell(rate, i, j))));
  const head = make("tr", {}, make("th", { scope: "row" }, "update"), ...names.slice(0, -1).map((name, i) => make("th", { scope: "col", title: players[i] }, name)));
  const legend = strangers.map((name, i) => make("span", {}, `S${i}: ${name}`));
  const scale = make("div", { style: `background: linear-gradient(to right, ${[0, 0.5, 1].map(shade).join(", ")})` });
  return make("div", { class: "chart" }, make("h3", {}, "who beats whom: wins of the row in %"),
    make("div", { class: "wide" }, make("table", { class: "heat" }, head, ...rows)),
    make("div", { class: "scale" }, "0 % loses", scale, "wins 100 %"),
    ...(strangers.length ? [make("div", { class: "legend" }, ...legend)] : []));
}

function fillLeague(section, runs) {
  for (const { name, league } of runs) {
    if (runs.length > 1) section.append(make("h3", {}, name));
    if (!league.curves.length) { section.append(note("No slot has weights yet.")); continue; }
    const opponents = [...league.updates.map((update) => `update ${update}`), ...league.strangers];
    const series = league.curves.map((curve, i) => ({ label: opponents[i], curve, stroke: color(i), dash: DASHES[Math.floor(i / 8) % 4] }));
    const met = series.filter(({ curve }) => curve);
    const legend = make("div", { class: "legend" }, ...met.map(({ label, stroke, dash }) => make("span", {}, sample(stroke, dash), label)));
    const place = make("div", { class: "charts" }, heatMap(league)), rates = met.length ? chart("win rate against each opponent", met) : null;
    if (rates) { rates.append(legend); place.append(rates); }
    if (league.elo) place.append(chart("Elo of the present team", [{ label: "Elo", curve: league.elo, stroke: color(0), dash: "" }]));
    section.append(place);
  }
  section.append(note("A player is the weights after so many updates, in a slot, or a stranger; a draw counts as half a win. The last row has " +
    "the games of the present team since the newest snapshot. A row of a slot has those of the team in the updates before its " +
    "snapshot, or with opponents=nash those that its weights played; – : they never met. Elo is relative to the " +
    "first snapshot, in games whose rewards add up to 0."));
}
