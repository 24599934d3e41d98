"use strict";
// What the reader chooses, and by which means: pointer, keys and controls all change `state`, and the page is drawn from
// it once a frame.

const state = {
  focus: 0, // the token that is looked at
  held: false, // whether it stays when the pointer moves on
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
let tinted; // the tint that is on the text, and what it found there
let found;

function drawSoon() {
  if (!waiting) requestAnimationFrame(draw);
  waiting = true;
}

function draw() {
  waiting = false;
  const tint = tints.find(({ name }) => name === state.tint);
  const lens = lenses.find(({ name }) => name === state.lens);
  if (tinted !== tint) found = showTint(tint);
  tinted = tint;
  const { most, best } = showLinks(lens.links(state.focus, state.head));
  document.querySelector(".token.focus")?.classList.remove("focus");
  pane.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
  elements[state.focus].classList.add("focus");
  elements[state.focus].setAttribute("aria-selected", "true");
  pane.setAttribute("aria-activedescendant", `token-${state.focus}`);
  pane.classList.toggle("held", state.held);
  showNeedle();
  // Where a button of the panel had the focus, the one in its place has it again.
  const buttons = () => [...panel.querySelectorAll("button")];
  const place = buttons().indexOf(document.activeElement);
  showPanel(state, go);
  if (place >= 0) buttons()[Math.min(place, buttons().length - 1)]?.focus();
  showMap(tint.signed, found, best, state.focus);
  showLegend(tint, found.full, most);
  for (const [name, control] of Object.entries(controls)) control.value = state[name];
  document.getElementById("said").textContent = inWords();
}

/** Rings the needle that the token in focus asks for. */
function showNeedle() {
  for (const element of pane.querySelectorAll(".told")) element.classList.remove("told");
  const [, told] = questionAt(state.focus) ?? [];
  if (told !== undefined) for (const token of [told, told + 1]) elements[token].classList.add("told");
}

function showLegend(tint, full, most) {
  const scale = make("span", { class: tint.signed ? "scale signed" : "scale" });
  const whole = tint.name === "nothing" ? [] : [fixed(tint.signed ? -full : 0), scale, fixed(full)];
  const links = make("span", { textContent: `full colour: ${percent(most)}` });
  document.getElementById("legend").replaceChildren(make("span", {}, ...whole), links);
}

/** The focus in a sentence, for those who hear the page. */
function inWords() {
  const row = rowFor(state.focus);
  const loss = lossAt(row);
  const without = said.losses.indexOf("without the state");
  const losses = loss === undefined ? "" : `; loss ${fixed(loss)}, without the state ${fixed(lossAt(row, without))}`;
  return `Token ${state.focus}: ${wordAt(state.focus)}${losses}`;
}

/** Moves the focus to a token, into sight, and holds it. */
function go(token) {
  const focus = Math.max(0, Math.min(TOKENS - 1, token));
  state.choose({ focus, held: true });
  elements[focus].scrollIntoView({ block: "nearest" });
}

/** The next of a control's choices, or with -1 the one before. */
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
    d: switchTheme,
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
  const places = said.questions.map(([key]) => key).sort((one, other) => one - other);
  if (places.length) go(places.find((key) => key > state.focus) ?? places[0]);
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");

/** The reader's system decides between dark and light until the reader does. */
function showTheme() {
  const theme = document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  drawSoon();
}

function switchTheme() {
  const root = document.documentElement;
  root.dataset.theme = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
  showTheme();
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

/** The line at the top, the names of the colours, and the title. */
function fillAbout() {
  const facts = { ...said.about, tokens: TOKENS.toLocaleString("en") };
  for (const [name, value] of Object.entries(facts)) {
    const pair = make("div", {}, make("dt", { textContent: name }), make("dd", {}, make("bdi", { textContent: value })));
    document.getElementById("facts").append(pair);
  }
  document.getElementById("ratio").textContent = said.ratio;
  const ways = [...said.ways.map((name) => [hueOf(name), titleOf(name)]), ["decoder", "the decoder"]];
  document.getElementById("key").append(
    ...ways.map(([hue, name]) => make("span", { class: `named hue-${hue}`, textContent: name })),
  );
  document.title = `GSM explorer: ${said.about.checkpoint ?? `${TOKENS} tokens`}`;
}

/** Where to begin: at the first question, else where the state saves most. */
function firstFocus() {
  if (said.questions.length) return said.questions[0][0];
  const state = said.losses.indexOf("without the state");
  let best = 0;
  for (let row = 0; row < TOKENS; row++) {
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
  document.getElementById("theme").onclick = switchTheme;
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
  dark.onchange = showTheme;
  new ResizeObserver(drawSoon).observe(map);
  if (said.questions.length) Object.assign(state, { tint: "retrieved" });
  state.focus = firstFocus();
  showTheme();
  elements[state.focus].scrollIntoView({ block: "center" });
  draw();
  document.documentElement.dataset.ready = String(Math.round(performance.now())); // ms from opening to here, for tests
}

begin();
