"use strict";
// The text: an element for each token, tinted by a quantity of the whole text. Tokens linked to the token in focus have the
// colour of the way. Beside the text is a map of all of it with the same colours.

/** Make an element with attributes, properties (`on...`, `textContent`) and children; strings are inserted as text. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "path"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on") || name === "textContent") element[name] = value;
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

const CLASSES = { t: "text", p: "piece", e: "end", k: "key", v: "value", f: "filler", n: "number" };
const pane = document.getElementById("text");
const map = document.getElementById("map");
const elements = data.words.map((word, token) => tokenElement(word, token));

function tokenElement(word, token) {
  const kind = CLASSES[data.kinds[token]];
  const element = make("span", { id: `token-${token}`, class: `token ${kind}`, role: "option", "aria-selected": "false" });
  element.dataset.token = token;
  if (kind === "piece") element.append("◌");
  word.split("\n").forEach((line, number) => {
    if (number) element.append(make("i", { "aria-hidden": "true" }), "\n");
    element.append(line);
  });
  const question = data.questions.findIndex(([, needle]) => token === needle || token === needle + 1);
  if (question >= 0) element.classList.add("needle");
  if (data.questions.some(([key]) => token === key)) element.classList.add("asks");
  return element;
}

function showText() {
  const text = document.createDocumentFragment();
  elements.forEach((element, token) => {
    if (token && !sameDocument(token, token - 1)) text.append(make("hr", { "aria-label": "next document" }));
    text.append(element);
  });
  pane.append(text);
}

/** Quantities that tint the text: `of(token)`, undefined for no value. `signed` quantities have both signs. */
const tints = [
  { name: "loss", label: AHEAD ? "loss of the token (nats)" : "loss at the row (nats)", of: (token) => lossAt(rowFor(token)) },
  ...data.losses.slice(1).map((loss, number) => ({
    name: loss,
    label: `loss ${loss} − whole (nats)`,
    signed: true,
    of: (token) => savedAt(rowFor(token), number + 1),
  })),
  { name: "retrieved", label: "weight of its slot in all stages", of: (token) => array("retrieved")[token] },
  { name: "read", label: "weight of its entry for later rows", of: (token) => array("read")[token] },
  { name: "nothing", label: "nothing", of: () => undefined },
].filter(({ name }) => name !== "retrieved" || STAGES.length);

/**
 * Tint the text. Return the value of every token, 0 for none, and the value of the full tint. 98 % of the values are below
 * it, so that an outlier does not make the other tints pale.
 */
function showTint(tint) {
  const values = elements.map((_, token) => tint.of(token) ?? 0);
  const sizes = values.map(Math.abs).filter((size) => size > 0).sort((first, second) => first - second);
  const full = sizes.length ? sizes[Math.floor((sizes.length - 1) * 0.98)] : 1;
  elements.forEach((element, token) => {
    element.style.setProperty("--tint", Math.round(100 * Math.min(1, Math.abs(values[token]) / full)));
    element.classList.toggle("gain", Boolean(tint.signed) && values[token] > 0);
  });
  return { values, full };
}

const inHue = (links, name) => links.map((link) => ({ ...link, hue: hueOf(name) }));

/** Choices of links to colour for the token in focus: `links(row, head)`, each `{at, count, weight, hue}`. */
const lenses = [
  {
    name: "stages",
    group: "Stages",
    label: "slots that all stages select",
    links: (row, head) => STAGES.flatMap((name) => inHue(readAt(name, row, head).far, name)),
  },
  ...STAGES.map((name) => ({ ...attentionLens(name), group: "Stages" })),
  {
    name: "made",
    group: "Its entry of the state",
    label: "its sources",
    links: (row) =>
      madeOf(row).sources.flatMap(({ at, count, ways }) =>
        ways.map((weight, way) => ({ at, count, weight, hue: hueOf(data.ways[way]) })),
      ),
  },
  ...data.ways.map((name, way) => ({
    name: `made by ${name}`,
    group: "Its entry of the state",
    label: `its sources by ${titleOf(name)}`,
    links: (row) =>
      inHue(madeOf(row).sources.map(({ at, count, ways }) => ({ at, count, weight: ways[way] })), name),
  })),
  {
    name: "readers",
    group: "Its entry of the state",
    label: "later rows that read it",
    links: (row, head) => inHue(readersOf(row, head), "decoder"),
  },
  {
    name: "decoder",
    group: "Decoder",
    label: "entries read, mean over layers",
    links: (row, head) => inHue(decoderReads(row, head).near, "decoder"),
  },
  ...DECODER.map((name) => ({ ...attentionLens(name), group: "Decoder" })),
  ...namesOf("encoder").map((name) => ({ ...attentionLens(name), group: "Encoder" })),
].filter(({ name }) => name !== "stages" || STAGES.length);

/** Return a title for a name such as `stage/1`. */
function titleOf(name) {
  const [kind, number] = name.split("/");
  return number === undefined ? "the encoder" : kind === "stage" ? `stage ${number}` : `${kind} layer ${number}`;
}

function attentionLens(name) {
  const [kind, number] = name.split("/");
  const far = width(`${name}/far`) > 0 ? ", slots and window" : kind === "decoder" ? "" : ", window";
  return {
    name,
    label: `${kind === "stage" ? "stage" : "layer"} ${number}${far}`,
    links: (row, head) => {
      const { near, far } = readAt(name, row, head);
      return inHue([...near, ...far], name);
    },
  };
}

/** Return the entries that decoder layers read, as a mean over the layers. */
function decoderReads(row, head) {
  const layers = DECODER.map((name) => readAt(name, row, head));
  const near = new Map();
  for (const layer of layers) {
    for (const { at, weight } of layer.near) near.set(at, (near.get(at) ?? 0) + weight / layers.length);
  }
  return {
    near: strongest([...near].map(([at, weight]) => ({ at, count: 1, weight }))),
    sink: layers.reduce((sum, layer) => sum + layer.sink, 0) / layers.length,
  };
}

let lit = []; // coloured tokens

/** Colour the linked tokens by their strongest links, `best`. `most` is the weight of the full colour. */
function showLinks(links) {
  for (const token of lit) elements[token].classList.remove("lit", elements[token].dataset.hue);
  const best = new Map();
  for (const link of links) {
    for (let token = link.at; token < link.at + link.count; token++) {
      if (link.weight > (best.get(token)?.weight ?? -1)) best.set(token, link);
    }
  }
  const most = Math.max(1e-9, ...links.map(({ weight }) => weight));
  lit = [...best.keys()];
  for (const [token, { weight, hue }] of best) {
    const element = elements[token];
    element.dataset.hue = `hue-${hue}`;
    element.classList.add("lit", `hue-${hue}`);
    element.style.setProperty("--weight", Math.round(10 + 80 * Math.sqrt(weight / most)));
  }
  return { most, best };
}

/** Draw the map of the whole text from top to bottom: the tint on the left, linked tokens across, the focus as a line. */
function showMap(signed, { values, full }, best, focus) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth, clientHeight } = map;
  if (!clientHeight) return;
  map.width = clientWidth * scale;
  map.height = clientHeight * scale;
  const pen = map.getContext("2d");
  pen.scale(scale, scale);
  const colours = getComputedStyle(document.documentElement);
  const height = Math.max(1, clientHeight / TOKENS);
  const y = (token) => (token / TOKENS) * clientHeight;
  const mark = (token, colour, alpha, left, right, thick = height) => {
    pen.globalAlpha = alpha;
    pen.fillStyle = colours.getPropertyValue(colour);
    pen.fillRect(left, y(token), right - left, thick);
  };
  values.forEach((value, token) => {
    if (value) mark(token, signed && value > 0 ? "--gain" : "--heat", 0.75 * Math.min(1, Math.abs(value) / full), 0, 8);
  });
  const most = Math.max(1e-9, ...[...best.values()].map(({ weight }) => weight));
  for (const [token, { weight, hue }] of best) {
    mark(token, `--${hue}`, 0.15 + 0.85 * Math.sqrt(weight / most), 9, clientWidth, Math.max(2, height));
  }
  data.questions.forEach(([, needle]) => mark(needle, "--ink", 0.8, 0, 3, Math.max(2, 2 * height)));
  mark(focus, "--ink", 1, 0, clientWidth, 1.5);
}

/** Return the nearest token on the line above (-1) or below (1); the same token if there is no such line. */
function beside(token, direction) {
  const { left, right, top, bottom } = elements[token].getBoundingClientRect();
  const middle = (left + right) / 2;
  let nearest = token;
  let line;
  for (let next = token + direction; next >= 0 && next < TOKENS; next += direction) {
    const box = elements[next].getClientRects()[0] ?? elements[next].getBoundingClientRect();
    if (line === undefined && (direction > 0 ? box.top < bottom - 2 : box.bottom > top + 2)) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 6) break;
    const distance = Math.abs((box.left + box.right) / 2 - middle);
    const before = elements[nearest].getClientRects()[0];
    if (nearest === token || distance < Math.abs((before.left + before.right) / 2 - middle)) nearest = next;
  }
  return nearest;
}
