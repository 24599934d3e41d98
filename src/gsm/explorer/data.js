"use strict";
// The content of the file: `data`, plain facts, and arrays, each decoded at its first use. All of it is numbers or text of
// the model or of the reader's file; none of it is ever inserted as HTML.

const data = JSON.parse(document.getElementById("about").textContent);
const TOKENS = data.tokens;
const HEADS = data.heads; // 1 if the file has only the mean over heads
const ALL = -1; // in place of a head: the mean over all heads
const TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };
const SHARE = Float32Array.from({ length: 256 }, (_, root) => (root / 255) ** 2); // shares are stored as their roots
const decoded = new Map();

/** Return the array of this name, flat, in row-major order. */
function array(name) {
  if (!decoded.has(name)) {
    const binary = atob(document.getElementById(`array-${name}`).textContent);
    const bytes = new Uint8Array(binary.length);
    for (let place = 0; place < binary.length; place++) bytes[place] = binary.charCodeAt(place);
    decoded.set(name, new TYPES[data.arrays[name][0]](bytes.buffer));
  }
  return decoded.get(name);
}

/** Return the length of an array's last dimension. */
const width = (name) => data.arrays[name].at(-1);

const readings = new Map(data.readings.map((reading) => [reading.name, reading]));
const namesOf = (kind) => [...readings.keys()].filter((name) => name.startsWith(`${kind}/`));
const STAGES = namesOf("stage");
const DECODER = namesOf("decoder");

const sameDocument = (first, second) => array("document")[first] === array("document")[second];

/** Return a weight of a row: of one head, or the mean over heads. */
function weightAt(name, row, head, place) {
  const values = array(name);
  const size = width(name);
  if (head !== ALL) return SHARE[values[(row * HEADS + head) * size + place]];
  let sum = 0;
  for (let each = 0; each < HEADS; each++) sum += SHARE[values[(row * HEADS + each) * size + place]];
  return sum / HEADS;
}

/**
 * Return the entries that an attention reads at a row.
 *
 * `near` has entries of the window or of the state, and `far` slots of the bank, the strongest first, each
 * `{at, count, weight}`: first token, number of tokens, and share of attention. `sink` is the share of the sink.
 */
function readAt(name, row, head) {
  const near = new Map();
  readings.get(name).back.forEach((back, entry) => {
    const at = row - back; // weights of several entries of one position are added
    if (at >= 0 && sameDocument(at, row)) near.set(at, (near.get(at) ?? 0) + weightAt(`${name}/near`, row, head, entry));
  });
  const far = [];
  const slots = width(`${name}/far`);
  for (let place = 0; place < slots; place++) {
    const slot = array(`${name}/chosen`)[row * slots + place] - 1;
    if (slot >= 0) far.push({ at: array("start")[slot], count: data.ratio, weight: weightAt(`${name}/far`, row, head, place) });
  }
  return {
    near: strongest([...near].map(([at, weight]) => ({ at, count: 1, weight }))),
    far: strongest(far),
    sink: weightAt(`${name}/sink`, row, head, 0),
  };
}

/** Return the later rows that read the entry of a row: `{at, count, weight}`, a mean over the decoder layers. */
function readersOf(row, head) {
  const readers = new Map();
  for (const name of DECODER) {
    const { back, own } = readings.get(name);
    for (let entry = 0; entry < back.length - own; entry++) {
      const at = row + back[entry];
      if (back[entry] === 0 || at >= TOKENS || !sameDocument(at, row)) continue;
      const weight = weightAt(`${name}/near`, at, head, entry) / DECODER.length;
      readers.set(at, (readers.get(at) ?? 0) + weight);
    }
  }
  return strongest([...readers].map(([at, weight]) => ({ at, count: 1, weight })));
}

/**
 * Return the sources of a row's entry: `sources`, `{at, count, weight, ways}`, the strongest first, with the share by each
 * way in `ways`; and `ways`, the share of each way over all sources, including those that are not in the file.
 */
function madeOf(row) {
  const count = width("source");
  const sources = [];
  for (let place = 0; place < count; place++) {
    const at = array("source")[row * count + place] - 1;
    if (at < 0) continue;
    const ways = data.ways.map((_, way) => SHARE[array("share")[(way * TOKENS + row) * count + place]]);
    sources.push({ at, count: 1, ways, weight: ways.reduce((sum, share) => sum + share, 0) });
  }
  return { sources, ways: data.ways.map((_, way) => SHARE[array("way")[way * TOKENS + row]]) };
}

const strongest = (links) => links.sort((first, second) => second.weight - first.weight);

/** A loss belongs to the predicting row. A token's loss is that of the previous row, if that row predicts it. */
const AHEAD = array("target").every((target, row) => target < 0 || target === array("token")[row + 1]);
const rowFor = (token) => (AHEAD ? token - 1 : token);

/** Return the loss at a row, in nats; `kind` is an index in `data.losses` (0: whole model); undefined without target. */
function lossAt(row, kind = 0) {
  const loss = row < 0 || row >= TOKENS ? NaN : array(`loss/${kind}`)[row];
  return Number.isNaN(loss) ? undefined : loss;
}

/** Return the increase of the loss at a row without a part of the model. */
function savedAt(row, kind) {
  const whole = lossAt(row);
  return whole === undefined ? undefined : lossAt(row, kind) - whole;
}

/** The text of a token on one line: by its place in the text, and by its id. */
const oneLine = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥") || "◌";
const wordAt = (token) => oneLine(data.words[token]);
const wordOf = (id) => oneLine((data.names[id] ?? [String(id)])[0]);

/** Return the question that a row asks or answers, or that has its needle there: positions [key, needle, due]. */
const questionAt = (row) =>
  data.questions.find(([key, , due]) => row === key || row === due) ??
  data.questions.find(([, needle]) => row === needle || row === needle + 1);

/** Return the name of the hue in page.css for a way or an attention. */
const hueOf = (name) =>
  name.startsWith("stage/") ? `stage${((name.slice(6) - 1) % 5) + 1}` : name.startsWith("decoder") ? "decoder" : "encoder";

/** Format a share as a percentage, with a non-breaking space. */
const percent = (share) => `${(share * 100).toFixed(share >= 0.0995 ? 0 : 1)}\u202f%`;

/** Format a number with `digits` decimals and a minus sign, but no negative zero. */
const fixed = (value, digits = 2) => (Number(value.toFixed(digits)) + 0).toFixed(digits).replace("-", "−");
