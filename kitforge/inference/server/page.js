"use strict";
const $ = (id) => document.getElementById(id);
const [talk, text, token, send, stop, base] = ["talk", "text", "token", "send", "stop", "base"].map($);
const NAME = document.querySelector("h1").textContent, KEY = "kitforge.chats";
const fresh = () => ({ id: Date.now(), messages: [] });
let chat = fresh(), running = null, edited = null;

// Text only: what is written is never read as HTML, but for what the server has made of Markdown, which escapes it.
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
const button = (textContent, onclick, more) => make("button", { type: "button", textContent, onclick, ...more });

// The end is followed as long as one is there: whoever has scrolled up reads on.
function follow(change) {
  const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  change();
  if (isAtEnd) talk.scrollTop = talk.scrollHeight;
}

function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (token.value) headers.Authorization = `Bearer ${token.value}`;
  return fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers });
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function render(articles, texts) {
  const isPlain = base.checked || !texts.length;
  const { html } = isPlain ? {} : await ask("/markdown", { texts }).then((found) => found.json()).catch(() => ({}));
  follow(() => articles.forEach((article, place) => {
    const body = article.querySelector(".body");
    body.classList.toggle("plain", !html);
    body[html ? "innerHTML" : "textContent"] = (html ?? texts)[place];
    for (const link of body.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noreferrer" });
    for (const block of body.querySelectorAll("pre")) block.append(button("Copy", copy));
  }));
}

function copy({ target }) {
  getSelection().selectAllChildren(target.previousSibling);
  // Unlike navigator.clipboard it also works where the page does not come over TLS.
  target.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
}

function fold(article, { thoughts, calls = [] }) {
  const called = calls.map((call) => `${call.name}(${call.arguments})`).join("\n");
  for (const [title, words] of [["Thoughts", thoughts], ["Tool calls", called]].filter(([, words]) => words)) {
    const details = make("details", { title }, make("summary", { textContent: title }), make("pre"));
    if (!article.querySelector(`[title="${title}"]`)) article.querySelector(".body").before(details);
    article.querySelector(`[title="${title}"] pre`).textContent = words;
  }
}

function view(message, place) {
  const isUser = message.role === "user", title = make("h2", { textContent: isUser ? "You" : NAME });
  const actions = make("p", { className: "actions" }, button("Regenerate", regenerate, { className: "last" }));
  if (isUser) actions.prepend(button("Edit", () => {
    [edited, text.value] = [place, message.content];
    text.focus();
  }));
  const body = make("div", { className: "body plain", textContent: message.content });
  const article = make("article", { className: message.role }, title, body, actions);
  fold(article, message);
  return article;
}

function draw() {
  talk.replaceChildren(...chat.messages.map(view));
  talk.scrollTop = talk.scrollHeight;
  $("note").hidden = !base.checked;
  list();
  const replies = chat.messages.filter(({ role }) => role === "assistant").map(({ content }) => content);
  return render([...talk.querySelectorAll(".assistant")], replies);
}

function list() {
  $("list").replaceChildren(...stored().map((each) => {
    const title = each.messages[0].content.slice(0, 60);
    const own = button(title, () => show(each), { ariaCurrent: String(each.id === chat.id) });
    return make("li", {}, own, button("Delete", () => {
      store(stored(each.id));
      each.id === chat.id ? show(fresh()) : list();
    }, { ariaLabel: `Delete ${title}` }));
  }));
}

function stored(without) {
  try {
    return JSON.parse(localStorage.getItem(KEY)).filter(({ id }) => id !== without);
  } catch {
    // Nothing is kept yet, or the browser keeps nothing.
    return [];
  }
}

function store(chats) {
  try {
    localStorage.setItem(KEY, JSON.stringify(chats));
  } catch {
    tell("The browser has no room for this conversation: delete others under Chats.");
  }
}

function show(other) {
  running?.abort();
  [chat, edited, $("system").value, $("meter").textContent] = [other, null, other.system ?? "", ""];
  tell("");
  draw();
  text.focus();
}

const tell = (words) => { [$("problem").textContent, $("problem").hidden] = [words, !words]; };
const regenerate = () => reply(chat.messages.slice(0, chat.messages.findLastIndex(({ role }) => role === "user") + 1));

async function request(messages, signal) {
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens"]) if ($(name).value) body[name] = Number($(name).value);
  if ($("model").value) body.model = $("model").value;
  const first = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  if (base.checked) body.prompt = messages.map(({ content }) => content).join("");
  else body.messages = [...first, ...messages.map(({ role, content }) => ({ role, content }))];
  for (;;) {
    const response = await ask(base.checked ? "/v1/completions" : "/v1/chat/completions", body, signal);
    if (response.ok) return response;
    const { error = {} } = await response.json().catch(() => ({})), isFull = error.code === "context_length_exceeded";
    if (response.status === 401) token.focus();
    if (response.status === 401) throw new Error("The token is wrong or missing: write it into the field Token.");
    if (!isFull) throw new Error(error.message ?? `The server answers with status ${response.status}.`);
    if (!body.max_tokens) throw new Error("The model reads no more than its context: use New chat, or edit a message.");
    // As much as there is room for.
    delete body.max_tokens;
  }
}

async function read(message, article, messages, signal) {
  const { body } = await request(messages, signal);
  let painting = null, first = 0, reason = null, usage = null;
  const paint = () => render([article], [message.content]).finally(() => { painting = null; });
  try {
    for await (const event of events(body)) {
      if (event.error) throw new Error(event.error.message);
      [first, usage] = [first || performance.now(), event.usage ?? usage];
      for (const { delta = {}, text: added, finish_reason } of event.choices) {
        reason = finish_reason ?? reason;
        message.content += added ?? delta.content ?? "";
        message.thoughts = (message.thoughts ?? "") + (delta.reasoning_content ?? delta.reasoning ?? "");
        for (const { index, function: called = {} } of delta.tool_calls ?? []) {
          const call = (message.calls ??= [])[index] ??= { name: "", arguments: "" };
          for (const key of ["name", "arguments"]) call[key] += called[key] ?? "";
        }
      }
      follow(() => fold(article, message));
      painting ??= new Promise((done) => setTimeout(done, 300)).then(paint);
    }
  } finally {
    await painting;
    await paint();
  }
  const speed = (usage.completion_tokens - 1) / Math.max(performance.now() - first, 1) * 1000;
  const used = `${usage.total_tokens} of ${talk.dataset.context} tokens of context`;
  $("meter").textContent = `${speed.toFixed(1)} tokens/s, ${used}${reason === "length" ? ", ended at Max tokens" : ""}`;
}

function busy(isBusy) {
  // A button that is hidden must not take the focus with it.
  if ([document.body, send, stop].includes(document.activeElement)) text.focus();
  [send.hidden, stop.hidden] = [isBusy, !isBusy];
  document.body.classList.toggle("busy", isBusy);
}

async function reply(messages) {
  const own = chat, before = own.messages, here = running = new AbortController();
  const message = { role: "assistant", content: "" }, article = view(message);
  [own.messages, own.system] = [messages, $("system").value];
  tell("");
  busy(true);
  // What is shown of the others stays: they need not be rendered again.
  [...talk.children].slice(messages.length - 1).forEach((each) => each.remove());
  talk.append(view(messages.at(-1), messages.length - 1), article);
  talk.scrollTop = talk.scrollHeight;
  const failure = await read(message, article, messages, here.signal).catch((error) => error);
  const isAnswered = !failure || message.content || message.thoughts || message.calls;
  own.messages = isAnswered ? [...messages, message] : before;
  if (isAnswered) store([own, ...stored(own.id)]);
  if (running === here) follow(() => busy(Boolean(running = null)));
  list();
  if (chat !== own) return;
  const isStopped = failure?.name === "AbortError", isGone = failure instanceof TypeError;
  if (failure && !isStopped) tell(isGone ? "The server does not answer: is it running?" : failure.message);
  // Once for a reply: a screen reader would read every token.
  $("status").textContent = failure ? "Stopped" : `${NAME}: ${article.querySelector(".body").textContent}`;
  if (isAnswered) return edited = null;
  // What was not answered can be said again.
  if (!before.includes(messages.at(-1))) text.value ||= messages.at(-1).content;
  draw();
}

async function loadModels() {
  const { data = [] } = await ask("/v1/models").then((response) => response.json()).catch(() => ({}));
  $("model").replaceChildren(...data.map(({ id }) => make("option", { textContent: id, value: id })));
  $("model").parentElement.hidden = data.length < 2;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = base.checked ? text.value : text.value.trim();
  if (!content || running) return;
  text.value = "";
  reply([...chat.messages.slice(0, edited ?? chat.messages.length), { role: "user", content }]);
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Escape") edited = null;
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
stop.addEventListener("click", () => running?.abort());
base.addEventListener("change", draw);
token.addEventListener("change", loadModels);
$("new").addEventListener("click", () => show(fresh()));
draw();
loadModels();
