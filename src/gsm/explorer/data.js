"use strict";
// What the file holds: `said`, plain facts, and arrays, each decoded when something first asks for it. Everything below
// is a number or a text of the model or of the reader's file; none of it is ever taken for HTML.

const said = JSON.parse(document.getElementById("about").textContent);
const TOKENS = said.tokens;
const HEADS = said.heads; // 1 where the file holds only their mean
const ALL = -1; // in place of a head: the mean over all
const TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };
const SHARE = Float32Array.from({ length: 256 }, (_, root) => (root / 255) ** 2); // shares are stored as their roots
const decoded = new Map();

/** The array of this name, flat, the last dimension running fastest. */
function array(name) {
  if (!decoded.has(name)) {
    const binary = atob(document.getElementById(`array-${name}`).textContent);
    const bytes = new Uint8Array(binary.length);
    for (let place = 0; place < binary.length; place++) bytes[place] = binary.charCodeAt(place);
    decoded.set(name, new TYPES[said.arrays[name][0]](bytes.buffer));
  }
  return decoded.get(name);
}

/** The length of an array's last dimension. */
const width = (name) => said.arrays[name].at(-1);

const readings = new Map(said.readings.map((reading) => [reading.name, reading]));
const namesOf = (kind) => [...readings.keys()].filter((name) => name.startsWith(`${kind}/`));
const STAGES = namesOf("stage");
const DECODER = namesOf("decoder");

const sameDocument = (one, other) => array("document")[one] === array("document")[other];

/** A weight of a row, the mean over heads or that of one. */
function weightAt(name, row, head, place) {
  const values = array(name);
  const size = width(name);
  if (head !== ALL) return SHARE[values[(row * HEADS + head) * size + place]];
  let sum = 0;
  for (let one = 0; one < HEADS; one++) sum += SHARE[values[(row * HEADS + one) * size + place]];
  return sum / HEADS;
}

/**
 * What an attention reads at a row.
 *
 * Returns `near`, entries of the window or of the state, and `far`, slots of the bank, the strongest first, each
 * `{at, count, weight}`: the first token, how many, and the share of attention; and `sink`, the share that reads nothing.
 */
function readAt(name, row, head) {
  const near = new Map();
  readings.get(name).back.forEach((back, entry) => {
    const at = row - back; // several entries of one position are added up
    if (at >= 0 && sameDocument(at, row)) near.set(at, (near.get(at) ?? 0) + weightAt(`${name}/near`, row, head, entry));
  });
  const far = [];
  const slots = width(`${name}/far`);
  for (let place = 0; place < slots; place++) {
    const slot = array(`${name}/chosen`)[row * slots + place] - 1;
    if (slot >= 0) far.push({ at: array("start")[slot], count: said.ratio, weight: weightAt(`${name}/far`, row, head, place) });
  }
  return {
    near: strongest([...near].map(([at, weight]) => ({ at, count: 1, weight }))),
    far: strongest(far),
    sink: weightAt(`${name}/sink`, row, head, 0),
  };
}

/** Where the entry of a row is read later: `{at, count, weight}` of each later row, a mean over these decoder layers. */
function readersOf(row, head, names = DECODER) {
  const found = new Map();
  for (const name of names) {
    const { back, own } = readings.get(name);
    for (let entry = 0; entry < back.length - own; entry++) {
      const at = row + back[entry];
      if (back[entry] === 0 || at >= TOKENS || !sameDocument(at, row)) continue;
      const weight = weightAt(`${name}/near`, at, head, entry) / names.length;
      found.set(at, (found.get(at) ?? 0) + weight);
    }
  }
  return strongest([...found].map(([at, weight]) => ({ at, count: 1, weight })));
}

/**
 * What the entry of a row is made of: `sources`, `{at, count, weight, ways}`, the strongest first, `ways` being the
 * share by each way; and `ways`, the share of each way over all sources, those that the file leaves out among them.
 */
function madeOf(row) {
  const kept = width("source");
  const sources = [];
  for (let place = 0; place < kept; place++) {
    const at = array("source")[row * kept + place] - 1;
    if (at < 0) continue;
    const ways = said.ways.map((_, way) => SHARE[array("share")[(way * TOKENS + row) * kept + place]]);
    sources.push({ at, count: 1, ways, weight: ways.reduce((sum, share) => sum + share, 0) });
  }
  return { sources, ways: said.ways.map((_, way) => SHARE[array("way")[way * TOKENS + row]]) };
}

const strongest = (links) => links.sort((one, other) => other.weight - one.weight);

/** Losses stand at the row that predicts; a token's own is that of the row before, where that row predicts it. */
const AHEAD = array("target").every((target, row) => target < 0 || target === array("token")[row + 1]);
const rowFor = (token) => (AHEAD ? token - 1 : token);

/** The loss at a row, in nats, whole (0) or without something, as numbered in `said.losses`; undefined: not asked. */
function lossAt(row, kind = 0) {
  const loss = row < 0 || row >= TOKENS ? NaN : array(`loss/${kind}`)[row];
  return Number.isNaN(loss) ? undefined : loss;
}

/** What the model loses at a row where something is taken away. */
function savedAt(row, kind) {
  const whole = lossAt(row);
  return whole === undefined ? undefined : lossAt(row, kind) - whole;
}

/** A token of the text on one line, and a token by its id alone. */
const oneLine = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥") || "◌";
const wordAt = (token) => oneLine(said.words[token]);
const wordOf = (id) => oneLine((said.names[id] ?? [String(id)])[0]);

/** The question that a row asks, or has to answer, or whose needle stands there: [where asked, where told, where due]. */
const questionAt = (row) =>
  said.questions.find(([key, , due]) => row === key || row === due) ??
  said.questions.find(([, told]) => row === told || row === told + 1);

/** A hue's name in page.css: of a way, of an attention. */
const hueOf = (name) =>
  name.startsWith("stage/") ? `stage${((name.slice(6) - 1) % 5) + 1}` : name.startsWith("decoder") ? "decoder" : "encoder";

/** A share as a percentage, with a space that breaks no line. */
const percent = (share) => `${(share * 100).toFixed(share >= 0.0995 ? 0 : 1)}\u202f%`;

/** A number with so many decimals, and a minus sign where it is not 0 with them. */
const fixed = (value, digits = 2) => (Number(value.toFixed(digits)) + 0).toFixed(digits).replace("-", "−");
