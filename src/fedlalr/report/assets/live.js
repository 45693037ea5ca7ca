// Keeps the page of `fedlalr watch` up to date: requests it again, and changes only what differs.

const PAUSE = 2000; // milliseconds between two requests, or more if they take long
const DRAWN = ".chart, .switches, #trajectories-of, #live, script:not(#data)"; // filled by scripts
const CONTROLS = "svg[tabindex], button, input, select";
let digest = "";

// Makes an element equal to a fresh one. What is equal stays as it is, with its scroll position and selection.
function adopt(old, fresh) {
  if (old.isEqualNode(fresh) || (old.matches && old.matches(DRAWN))) return;
  if (old.nodeName !== fresh.nodeName || !old.hasChildNodes()) { old.replaceWith(fresh); return; }
  const now = [...old.childNodes], next = [...fresh.childNodes];
  now.forEach((child, i) => (i < next.length ? adopt(child, next[i]) : child.remove()));
  old.append(...next.slice(now.length));
}

function refresh(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const open = new Set([...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  const focus = document.activeElement, holder = focus.closest("[id]");
  const place = holder ? [...holder.querySelectorAll(CONTROLS)].indexOf(focus) : -1;
  document.title = fresh.title;
  adopt(document.body, fresh.body);
  for (const summary of document.querySelectorAll("details > summary")) summary.parentElement.open = open.has(summary.textContent);
  show();
  if (place >= 0 && !focus.isConnected) {
    const control = [...find(holder.id).querySelectorAll(CONTROLS)][place];
    if (control) control.focus({ preventScroll: true });
  }
}

function fail(reason) {
  digest = ""; // the next page counts as changed
  find("live").textContent = `Not up to date: ${reason}`;
}

async function poll() {
  const began = performance.now();
  try {
    const reply = await fetch("/", { cache: "no-store", headers: { "If-None-Match": digest } });
    if (reply.status === 200) {
      refresh(await reply.text());
      digest = reply.headers.get("ETag");
      find("live").textContent = `Live; last change at ${new Date().toLocaleTimeString()}.`;
    } else if (reply.status !== 304) fail(await reply.text());
  } catch {
    fail("fedlalr watch does not answer.");
  }
  setTimeout(poll, Math.max(PAUSE, 9 * (performance.now() - began)));
}

poll();
