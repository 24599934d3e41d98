"use strict";
// The reader's choices: pointer, keys and controls change `state`, and the page is drawn from it once per frame.

const state = {
  focus: 0, // the token in focus
  held: false, // whether it stays in focus when the pointer moves
  head: ALL,
  lens: lenses[0].name,
  tint: tints[0].name,
  choose(changes) {
    Object.assign(state, changes);
    drawSoon();
  },
};
const controls = Object.fromEntries(["tint", "lens", "head"].map((name) => [name, document.getElementById(name)]));
let waiting = false;
let tinted; // the current tint of the text
let tinting; // the result of showTint for it

function drawSoon() {
  if (!waiting) requestAnimationFrame(draw);
  waiting = true;
}

function draw() {
  waiting = false;
  const tint = tints.find(({ name }) => name === state.tint);
  const lens = lenses.find(({ name }) => name === state.lens);
  if (tinted !== tint) tinting = showTint(tint);
  tinted = tint;
  const { most, best } = showLinks(lens.links(state.focus, state.head));
  document.querySelector(".token.focus")?.classList.remove("focus");
  pane.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
  elements[state.focus].classList.add("focus");
  elements[state.focus].setAttribute("aria-selected", "true");
  pane.setAttribute("aria-activedescendant", `token-${state.focus}`);
  pane.classList.toggle("held", state.held);
  showNeedle();
  // If a button of the panel had the keyboard focus, the new button in its place gets it.
  const buttons = () => [...panel.querySelectorAll("button")];
  const place = buttons().indexOf(document.activeElement);
  showPanel(state, go);
  if (place >= 0) buttons()[Math.min(place, buttons().length - 1)]?.focus();
  showMap(tint.signed, tinting, best, state.focus);
  showLegend(tint, tinting.full, most);
  for (const [name, control] of Object.entries(controls)) control.value = state[name];
  document.getElementById("status").textContent = inWords();
}

/** Mark the needle of the question at the token in focus with a ring. */
function showNeedle() {
  for (const element of pane.querySelectorAll(".sought")) element.classList.remove("sought");
  const [, needle] = questionAt(state.focus) ?? [];
  if (needle !== undefined) for (const token of [needle, needle + 1]) elements[token].classList.add("sought");
}

function showLegend(tint, full, most) {
  const scale = make("span", { class: tint.signed ? "scale signed" : "scale" });
  const whole = tint.name === "nothing" ? [] : ["tint: ", fixed(tint.signed ? -full : 0), scale, fixed(full)];
  const links = make("span", { textContent: `strongest colour: a weight of ${percent(most)}` });
  document.getElementById("legend").replaceChildren(make("span", {}, ...whole), links);
}

/** Describe the focus in a sentence, for screen readers. */
function inWords() {
  const row = rowFor(state.focus);
  const loss = lossAt(row);
  const without = data.losses.indexOf("without the state");
  const losses = loss === undefined ? "" : `; loss ${fixed(loss)}, without the state ${fixed(lossAt(row, without))}`;
  return `Token ${state.focus}: ${wordAt(state.focus)}${losses}`;
}

/** Move the focus to a token, scroll to it, and hold it. */
function go(token) {
  const focus = Math.max(0, Math.min(TOKENS - 1, token));
  state.choose({ focus, held: true });
  elements[focus].scrollIntoView({ block: "nearest" });
}

/** Select the next choice of a control, or with -1 the previous one. */
function turn(name, direction) {
  const choices = [...controls[name].options].map(({ value }) => value);
  const next = (choices.indexOf(String(state[name])) + direction + choices.length) % choices.length;
  state.choose({ [name]: name === "head" ? Number(choices[next]) : choices[next] });
}

const moves = {
  ArrowLeft: () => state.focus - 1,
  ArrowRight: () => state.focus + 1,
  ArrowUp: () => beside(state.focus, -1),
  ArrowDown: () => beside(state.focus, 1),
  Home: () => 0,
  End: () => TOKENS - 1,
  PageUp: () => state.focus - 100,
  PageDown: () => state.focus + 100,
};

function onKey(event) {
  const direction = event.shiftKey ? -1 : 1;
  const letters = {
    t: () => turn("tint", direction),
    l: () => turn("lens", direction),
    h: () => turn("head", direction),
    q: nextQuestion,
    escape: () => state.choose({ held: false }),
  };
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, summary")) return;
  const act = letters[event.key.toLowerCase()];
  if (act) act();
  else if (document.activeElement === pane && moves[event.key]) go(moves[event.key]());
  else if (document.activeElement === pane && event.key === "Enter") state.choose({ held: !state.held });
  else return;
  event.preventDefault();
}

function nextQuestion() {
  const places = data.questions.map(([key]) => key).sort((first, second) => first - second);
  if (places.length) go(places.find((key) => key > state.focus) ?? places[0]);
}

function fillControls() {
  controls.tint.append(...tints.map(({ name, label }) => make("option", { value: name, textContent: label })));
  const groups = [...new Set(lenses.map(({ group }) => group))];
  for (const label of groups) {
    const inside = lenses.filter(({ group }) => group === label);
    const options = inside.map((lens) => make("option", { value: lens.name, textContent: lens.label }));
    controls.lens.append(make("optgroup", { label }, ...options));
  }
  const mean = make("option", { value: ALL, textContent: "mean over heads" });
  const heads = HEADS > 1 ? [...Array(HEADS).keys()] : [];
  controls.head.append(mean, ...heads.map((head) => make("option", { value: head, textContent: `head ${head + 1}` })));
  controls.head.disabled = HEADS === 1;
}

/** Fill the line at the top, the names of the colours, and the title. */
function fillAbout() {
  const facts = { ...data.about, tokens: TOKENS.toLocaleString("en") };
  for (const [name, value] of Object.entries(facts)) {
    const pair = make("div", {}, make("dt", { textContent: name }), make("dd", {}, make("bdi", { textContent: value })));
    document.getElementById("facts").append(pair);
  }
  document.getElementById("ratio").textContent = data.ratio;
  const ways = [...data.ways.map((name) => [hueOf(name), titleOf(name)]), ["decoder", "the decoder"]];
  document.getElementById("key").append(
    ...ways.map(([hue, name]) => make("span", { class: `named hue-${hue}`, textContent: name })),
  );
  document.title = `GSM explorer: ${data.about.checkpoint ?? `${TOKENS} tokens`}`;
}

/** Return the initial focus among the visible tokens: the first question, else the row with most gain from the state. */
function firstFocus() {
  const bottom = pane.getBoundingClientRect().bottom;
  const last = elements.findLastIndex((element) => element.getBoundingClientRect().bottom <= bottom);
  const question = data.questions.find(([key]) => key <= last);
  if (question) return question[0];
  const state = data.losses.indexOf("without the state");
  let best = 0;
  for (let row = 0; row <= last; row++) {
    if ((savedAt(row, state) ?? -Infinity) > (savedAt(best, state) ?? -Infinity)) best = row;
  }
  return best;
}

function begin() {
  showText();
  fillControls();
  fillAbout();
  for (const [name, control] of Object.entries(controls)) {
    control.onchange = () => state.choose({ [name]: name === "head" ? Number(control.value) : control.value });
  }
  document.getElementById("controls").onsubmit = () => false;
  document.addEventListener("keydown", onKey);
  const tokenOf = (event) => event.target.closest?.("[data-token]")?.dataset.token;
  pane.onmouseover = (event) => {
    const token = tokenOf(event);
    if (token !== undefined && !state.held) state.choose({ focus: Number(token) });
  };
  pane.onclick = (event) => {
    const token = Number(tokenOf(event) ?? state.focus);
    state.choose({ focus: token, held: !(state.held && token === state.focus) });
  };
  map.onclick = (event) => go(Math.floor((event.offsetY / map.clientHeight) * TOKENS));
  window.matchMedia("(prefers-color-scheme: dark)").onchange = drawSoon;
  new ResizeObserver(drawSoon).observe(map);
  if (data.questions.length) Object.assign(state, { tint: "retrieved" });
  state.focus = firstFocus();
  draw();
  document.documentElement.dataset.ready = String(Math.round(performance.now())); // ms since the page was opened, for tests
}

begin();
