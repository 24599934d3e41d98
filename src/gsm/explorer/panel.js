"use strict";
// The panel beside the text: sections about the token in focus. Each has a strip of the whole text from left to right, and a
// list of the strongest links.

const panel = document.getElementById("panel");
const SHOWN = 5; // links in a list
const AROUND = 4; // tokens of context on either side

/**
 * Draw links as bars between two tokens, by default over the whole text, with a line at the token in focus and a triangle
 * at the needle of its question.
 */
function strip(links, focus, label, [from, to] = [0, TOKENS]) {
  const x = (token) => ((token - from) / (to - from)) * 1000;
  const most = Math.max(1e-9, ...links.map(({ weight }) => weight));
  const bars = links.map(({ at, count, weight, hue }) => {
    const height = Math.max(2, 34 * (weight / most));
    const size = { x: x(at), y: 36 - height, width: Math.max(4, x(at + count) - x(at) - 1), height };
    return make("rect", { ...size, class: `hue-${hue}` });
  });
  const [, needle] = questionAt(focus) ?? [];
  const inside = needle !== undefined && needle >= from;
  const marks = inside ? [make("path", { d: `M${x(needle + 1)} 38 l9 11 l-18 0 z`, class: "mark" })] : [];
  const line = make("line", { x1: x(focus + 0.5), x2: x(focus + 0.5), y1: 0, y2: 37, class: "focus" });
  const base = make("line", { x1: 0, x2: 1000, y1: 36.5, y2: 36.5, class: "base" });
  const attributes = { viewBox: "0 0 1000 50", preserveAspectRatio: "none", role: "img", "aria-label": label };
  const ends = make("span", { class: "ends" }, make("span", { textContent: from }), make("span", { textContent: to - 1 }));
  return make("div", { class: "axis" }, make("svg", { ...attributes, class: "strip" }, base, ...bars, line, ...marks), ends);
}

/** Return the range of positions around a row with entries that it sees, or that see its entry. */
function reachOf(row) {
  const reach = Math.max(...DECODER.flatMap((name) => readings.get(name).back)) + 1;
  return [Math.max(0, row - reach), Math.min(TOKENS, row + reach + 1)];
}

/** Return a piece of the text: these tokens, with a pale context. */
function excerpt(at, count) {
  const joint = data.kinds[at] === "t" || data.kinds[at] === "p" ? "" : " ";
  const text = (from, to) => {
    let words = "";
    for (let token = Math.max(0, from); token < Math.min(TOKENS, to); token++) words += wordAt(token) + joint;
    return words;
  };
  const around = (from, to) => make("span", { class: "around", textContent: text(from, to) });
  const tokens = make("b", { textContent: text(at, at + count).trimEnd() || "␣" });
  return make("bdi", {}, around(at - AROUND, at), tokens, joint, around(at + count, at + count + AROUND));
}

/** List the strongest links; each is a button that moves the focus there. */
function listed(links, focus, go) {
  const most = Math.max(1e-9, ...links.map(({ weight }) => weight));
  const items = strongest([...links]).slice(0, SHOWN).map(({ at, count, weight, hue }) => {
    const away = at - focus;
    const where = away === 0 ? "itself" : `${fixed(away, 0).replace(/^(?=\d)/, "+")}`;
    const bar = make("span", { class: `bar hue-${hue}` });
    bar.style.setProperty("--size", `${(100 * weight) / most}%`);
    const label = `${percent(weight)}, ${where}: ${wordAt(at)}; go to token ${at}`;
    return make(
      "li",
      {},
      make(
        "button",
        { type: "button", class: "link", "aria-label": label, onclick: () => go(at) },
        make("span", { class: "number", textContent: percent(weight) }),
        bar,
        make("span", { class: "away", textContent: where }),
        excerpt(at, count),
      ),
    );
  });
  return make("ol", {}, ...items);
}

/** Return a section with a heading that also selects the colours in the text. */
function section(title, note, lens, state, ...children) {
  const choose = { type: "button", "aria-pressed": String(state.lens === lens), onclick: () => state.choose({ lens }) };
  const heading = make("h3", {}, make("button", { ...choose, title: "colour this in the text" }, title));
  return make("section", {}, heading, make("p", { class: "note", textContent: note }), ...children);
}

/** Return a token in a box, with a count for a run of blanks. */
function chip(text, kind) {
  const counted = text.replace(/^ $/, "␣").replace(/ {3,}/g, (run) => `␣×${run.length}`);
  return make("bdi", { class: `chip ${CLASSES[kind]}`, textContent: counted });
}

function headline(row) {
  const target = array("target")[row];
  const next = target < 0 ? [] : [make("span", { class: "to", textContent: "should predict" }), chipOf(target)];
  const guesses = width("guess");
  const likeliest = [...Array(guesses).keys()].map((place) => {
    const id = array("guess")[row * guesses + place];
    return make(
      "span",
      { class: id === target ? "guess right" : "guess" },
      chipOf(id),
      ` ${percent(SHARE[array("chance")[row * guesses + place]])}`,
    );
  });
  const question = questionAt(row);
  const notes = [];
  if (question) {
    const [key, needle, due] = question;
    const asks = key === due ? "asks, and answers at once" : row === due ? "answer due here" : "asks";
    const role = row === key || row === due ? asks : "the needle";
    notes.push(make("p", { class: "note", textContent: `${role}: needle at ${needle}, asked at ${key}, due at ${due}` }));
  }
  return make(
    "section",
    {},
    make("h2", {}, make("small", { textContent: `row ${row}` }), " ", chip(wordAt(row), data.kinds[row]), ...next),
    ...notes,
    make("p", { class: "guesses" }, make("span", { class: "note", textContent: "predicts" }), ...likeliest),
  );
}

const chipOf = (id) => chip(wordOf(id), (data.names[id] ?? ["", "n"])[1]);

/** Return the rows of the loss table: the rows that predict the token and the next one, or where its question is due. */
function rowsOfLoss(row) {
  const near = AHEAD ? [[row - 1, "this token"], [row, "the next"]] : [[row, "asked here"]];
  const asked = near.filter(([at]) => lossAt(at) !== undefined);
  const [, , due] = questionAt(row) ?? [];
  return asked.length || due === undefined ? asked : [[due, `the answer, due at ${due}`]];
}

/** Return the table of losses, of the whole model and without its parts. */
function losses(row) {
  const columns = rowsOfLoss(row);
  if (!columns.length) {
    const nothing = make("p", { class: "note", textContent: "No target here." });
    return make("section", {}, make("h3", { textContent: "Loss" }), nothing);
  }
  const most = Math.max(0.1, ...columns.flatMap(([at]) => data.losses.map((_, kind) => lossAt(at, kind))));
  const head = make("tr", {}, make("td"), ...columns.map(([, label]) => make("th", { scope: "col", textContent: label })));
  const lines = data.losses.map((name, kind) => {
    const cells = columns.map(([at]) => {
      const bar = make("span", { class: `bar ${kind ? "hue-gain" : "hue-heat"}` });
      bar.style.setProperty("--size", `${(100 * lossAt(at, kind)) / most}%`);
      const more = kind ? savedAt(at, kind) : 0;
      const change = kind ? ` ${more >= 0 ? "+" : ""}${fixed(more)}` : "";
      const strong = Math.abs(more) >= 0.5 ? "change strong" : "change";
      return make("td", {}, fixed(lossAt(at, kind)), make("span", { class: strong, textContent: change }), bar);
    });
    return make("tr", {}, make("th", { scope: "row", textContent: name }), ...cells);
  });
  return make(
    "section",
    {},
    make("h3", { textContent: "Loss" }),
    make("table", {}, make("caption", { class: "note", textContent: "in nats, whole and without a part" }), head, ...lines),
  );
}

/** Return the sections of the stages' selections. */
function stages(row, state, go) {
  return STAGES.map((name) => {
    const { near, far, sink } = readAt(name, row, state.head);
    const inWindow = near.reduce((sum, { weight }) => sum + weight, 0);
    const inBank = far.reduce((sum, { weight }) => sum + weight, 0);
    const where = `on encoder layer ${readings.get(name).layer}`;
    const shares = `${percent(inBank)} to ${far.length} slots, ${percent(inWindow)} to the window, ${percent(sink)} to the sink`;
    const note = `${where}: ${shares}`;
    const links = inHue(far, name);
    const body = far.length ? [strip(links, row, note), listed(links, row, go)] : [];
    return section(capital(titleOf(name)), note, name, state, ...body);
  });
}

/** Return the section about the sources of the row's entry. */
function made(row, state, go) {
  const { sources, ways } = madeOf(row);
  const links = sources.map((source) => {
    const way = source.ways.indexOf(Math.max(...source.ways));
    return { ...source, hue: hueOf(data.ways[way]) };
  });
  const parts = ways.map((share, way) => {
    const part = make("span", { class: `hue-${hueOf(data.ways[way])}`, textContent: share > 0.08 ? percent(share) : "" });
    part.style.setProperty("--size", share);
    return part;
  });
  const label = ways.map((share, way) => `${titleOf(data.ways[way])} ${percent(share)}`).join(", ");
  const total = sources.reduce((sum, { weight }) => sum + weight, 0);
  const note = `${capital(label)}. Sources by rollout; the ${sources.length} strongest are ${percent(Math.min(1, total))}.`;
  const stack = make("div", { class: "stack", role: "img", "aria-label": label }, ...parts);
  return section("Its entry is made of", note, "made", state, stack, strip(links, row, note), listed(links, row, go));
}

/** Return the section about the later rows that read the row's entry. */
function readers(row, state, go) {
  const links = inHue(readersOf(row, state.head), "decoder");
  const total = links.reduce((sum, { weight }) => sum + weight, 0);
  const note = links.length
    ? `${links.length} later rows see it; together they give it ${fixed(total)} of their attention, a mean over decoder layers`
    : "No later row sees it.";
  const body = links.length ? [strip(links, row, note, reachOf(row)), listed(links, row, go)] : [];
  return section("Its entry is read by", note, "readers", state, ...body);
}

/** Return the section about the entries that the decoder reads at the row. */
function reads(row, state, go) {
  const name = DECODER.includes(state.lens) ? state.lens : "decoder";
  const { near, sink } = name === "decoder" ? decoderReads(row, state.head) : readAt(name, row, state.head);
  const layers = name === "decoder" ? `mean over ${DECODER.length} layers` : titleOf(name);
  const note = `${layers}: ${near.length} entries of the state, ${percent(sink)} to the sink`;
  const links = inHue(near, "decoder");
  return section("The decoder reads here", note, name, state, strip(links, row, note, reachOf(row)), listed(links, row, go));
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function showPanel(state, go) {
  const row = state.focus;
  panel.replaceChildren(
    headline(row),
    losses(row),
    ...stages(row, state, go),
    made(row, state, go),
    reads(row, state, go),
    readers(row, state, go),
  );
}
