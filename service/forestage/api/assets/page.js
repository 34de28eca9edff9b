"use strict";
// Polls /v1/status and draws it. Everything from the service goes in as text, never as markup.
const EVERY_MS = 1000, PATIENCE_MS = 5000;
const by = (id) => document.getElementById(id);
const make = (tag, text, ...classes) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  element.classList.add(...classes);
  return element;
};
const number = (value) => value.toLocaleString("en").replaceAll(",", "\u202f");
const size = (bytes) => {
  let unit = 0;
  while (bytes >= 1024 && unit < 5) { bytes /= 1024; unit += 1; }
  return `${bytes < 10 && unit ? bytes.toFixed(1) : Math.round(bytes)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
};
const span = (ms) => ms < 1000 ? `${Math.round(ms)} ms` : ms < 90000 ? `${(ms / 1000).toFixed(1)} s`
  : ms < 5400000 ? `${Math.round(ms / 60000)} min` : ms < 172800000 ? `${Math.round(ms / 3600000)} h` : `${Math.round(ms / 86400000)} days`;
const sum = (values) => values.reduce((a, b) => a + b, 0);
// By what has to be done: colours of one family for what L3 lacks, what the pool lacks, who stopped it, what was bad.
const REASONS = {
  not_stored: "#8a938f", storage_unavailable: "#b3261e", no_boundary: "#5f6f9e", host_capacity: "#c68a12", below_min_pages: "#b9a27a",
  deadline: "#8b4a9c", finished: "#b07cc0", cancelled: "#cfa9d8", shutdown: "#69407a", vanished: "#2e7fa8", corrupt: "#e0563f", storage_error: "#e58f7f",
};
let token = "", timer = 0, paused = false, latest = null;

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("forestage-token", given);
    history.replaceState(null, "", location.pathname);
  }
  return given || sessionStorage.getItem("forestage-token") || "";
}

function askForToken(refused) {
  by("live").hidden = by("pause").hidden = by("health").hidden = true;
  by("facts").textContent = "";
  if (refused) by("sign-in-why").textContent = "The service did not take this token.";
  by("sign-in").hidden = false;
  by("token").focus();
}

async function look() {
  clearTimeout(timer);
  try {
    const headers = { Accept: "application/json" };
    if (token) headers.Authorization = `Bearer ${token}`;
    const answer = await fetch("/v1/status", { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 401) {
      sessionStorage.removeItem("forestage-token");
      askForToken(Boolean(token));
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    latest = await answer.json();
    if (!paused) draw(latest);
  } catch (error) {
    by("health").hidden = false;
    say("No answer from the service; what is shown is old.", true);
  }
  plan();
}

function plan() {
  clearTimeout(timer);
  if (!paused && !document.hidden) timer = setTimeout(look, EVERY_MS);
}

function say(text, bad) {
  const health = by("health");
  if (health.textContent !== text) health.textContent = text; // else it would be read out again
  health.classList.toggle("bad", bad);
}

function draw(status) {
  by("sign-in").hidden = true;
  by("live").hidden = by("health").hidden = by("pause").hidden = false;
  by("facts").textContent = `${status.version}, up ${span(status.uptime_s * 1000)}`;
  const up = status.storage.state === "up";
  say(status.state === "stopping" ? "Stopping" : up ? "Ready, storage up" : "Ready, but storage is degraded", !up || status.state === "stopping");
  drawPool(status);
  drawJobs(status);
  drawShortfall(status);
  drawStorage(status);
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn || 0) + 1);
}

function drawPool(status) {
  by("pool-facts").textContent = `${status.pool_path}, ${size(status.pool_bytes)}, pinned: ${status.pinned}; `
    + `${number(status.leases)} leases, ${number(status.pins)} pins; `
    + `${size(status.inflight_bytes)} of ${size(status.inflight_limit_bytes)} promised to running jobs`;
  const states = status.pool.length ? status.pool[0].map.states : [];
  by("pool-legend").replaceChildren(...states.map((state) => {
    const item = make("li"), mark = make("i");
    mark.style.background = `var(--${state})`;
    item.append(mark, state);
    return item;
  }));
  const place = by("pool");
  while (place.children.length > status.pool.length) place.lastChild.remove();
  status.pool.forEach((part, i) => {
    if (!place.children[i]) {
      const box = make("div");
      box.append(make("h4"), make("canvas"), make("dl", undefined, "counts"));
      box.children[1].setAttribute("role", "img");
      place.append(box);
    }
    const [title, canvas, counts] = place.children[i].children;
    title.textContent = `${part.model} ${part.component}: ${number(part.slots)} slots of ${size(part.slot_bytes)}`;
    canvas.setAttribute("aria-label", `Map of the slots of ${part.model} ${part.component}, ${part.map.cells.length} cells; the numbers follow`);
    counts.replaceChildren(...[...Object.entries(part.states), ["evicted so far", part.evicted_pages]].map(([state, slots]) => {
      const pair = make("div"), value = make("dd", number(slots));
      value.dataset.number = `${part.model}/${part.component}/${state}`;
      value.dataset.value = slots;
      pair.append(make("dt", state), value);
      return pair;
    }));
    drawMap(canvas, part.map);
  });
}

function drawMap(canvas, map) {
  const scale = devicePixelRatio || 1, width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
  if (!width || !height) return;
  canvas.width = width;
  canvas.height = height;
  const look = getComputedStyle(document.documentElement), paint = canvas.getContext("2d");
  const colours = map.states.map((state) => look.getPropertyValue(`--${state}`).trim());
  // The number of rows that makes cells most nearly square.
  const num = map.cells.length, rows = Math.max(1, Math.min(num, Math.round(Math.sqrt(num * height / width)))), columns = Math.ceil(num / rows);
  const w = width / columns, h = height / rows, gap = w > 5 * scale ? scale : 0;
  map.cells.forEach((cell, i) => {
    const x = (i % columns) * w, top = Math.floor(i / columns) * h, all = sum(cell);
    let y = top;
    cell.forEach((slots, state) => {
      const part = slots / all * (h - gap);
      paint.fillStyle = colours[state];
      paint.fillRect(x, y, w - gap, part);
      y += part;
    });
  });
}

function jobItem(job, head, tail) {
  const item = make("li"), track = make("div", undefined, "track"), all = Math.max(1, job.pages.requested);
  const lengths = [["stored", job.pages.stored], ["granted", job.pages.granted], ["come", job.contiguous ?? 0], ["ready", job.pages.ready]];
  for (const [name, pages] of lengths) {
    const bar = make("span", undefined, `bar-${name}`);
    bar.style.width = `${pages / all * 100}%`;
    track.append(bar);
  }
  track.setAttribute("aria-hidden", "true");
  const said = ["requested", "stored", "granted", "ready"].map((name) => `${name} ${number(job.pages[name])}`).join(", ");
  item.append(make("div", head), track, make("div", `${said}${tail}`, "lengths"));
  return item;
}

function drawJobs(status) {
  const facts = by("jobs-facts");
  facts.textContent = `${Object.entries(status.jobs).map(([state, jobs]) => `${number(jobs)} ${state}`).join(", ")}`
    + (status.running_not_shown ? `; ${number(status.running_not_shown)} more than are shown` : "");
  for (const [state, jobs] of Object.entries(status.jobs)) facts.dataset[state] = jobs;
  by("running").replaceChildren(...status.running.map((job) => jobItem(job, `${job.request_id}, ${job.model}: ${job.state} for ${span(job.age_ms)}`,
    job.deadline_in_ms === null ? "" : `; deadline in ${span(Math.max(0, job.deadline_in_ms))}`)));
  if (!status.running.length) by("running").append(make("li", "none", "lengths"));
  by("finished").replaceChildren(...status.finished.map((job) => {
    const short = Object.entries(job.shortfall).map(([reason, pages]) => `${number(pages)} ${reason}`).join(", ");
    return jobItem(job, `${job.request_id}, ${job.model}: ${job.outcome} in ${span(job.total_ms)}, ${span(job.ago_ms)} ago`, short && `; short by ${short}`);
  }));
  if (!status.finished.length) by("finished").append(make("li", "none", "lengths"));
}

function columns(place, buckets, partsOf) {
  const highest = Math.max(1, ...buckets.map((bucket) => sum(partsOf(bucket).map(([, value]) => value))));
  place.replaceChildren(...buckets.map((bucket) => {
    const column = make("div");
    column.style.height = "100%";
    for (const [colour, value] of partsOf(bucket)) {
      if (!value) continue;
      const part = make("span");
      part.style.background = colour;
      part.style.height = `${value / highest * 100}%`;
      column.append(part);
    }
    return column;
  }));
  return highest;
}

function row(name, colour, id, ...values) {
  const line = make("tr"), head = make("th");
  head.scope = "row";
  if (colour) {
    const mark = make("i");
    mark.style.background = colour;
    const cell = make("td");
    cell.append(mark, name);
    line.append(cell);
  } else {
    head.textContent = name;
    line.append(head);
  }
  for (const value of values) {
    const cell = make("td", typeof value === "number" ? number(value) : value, "number");
    line.append(cell);
  }
  line.lastChild.dataset.number = id;
  line.lastChild.dataset.value = values.at(-1);
  return line;
}

function drawShortfall(status) {
  const buckets = status.recent.buckets, totals = status.totals, recent = (name) => sum(buckets.map((bucket) => bucket[name]));
  const reasons = Object.keys(REASONS).filter((reason) => totals.shortfall_pages[reason]);
  columns(by("short-chart"), buckets, (bucket) => [["var(--ready)", bucket.ready_pages],
    ...reasons.map((reason) => [REASONS[reason], bucket.shortfall_pages[reason] || 0])]);
  const asked = recent("requested_pages"), ready = recent("ready_pages");
  by("short-facts").textContent = asked ? `${number(ready)} of ${number(asked)} pages were ready (${(ready / asked * 100).toFixed(1)} %)` : "no prefetch ended";
  by("short-chart").setAttribute("aria-label", `Pages of ended prefetches by time, ${buckets.length} columns of ${status.recent.bucket_ms / 1000} s; the sums follow as a table`);
  by("short-table").tBodies[0].replaceChildren(
    row("requested", "", "requested", asked, totals.requested_pages),
    row("ready", "var(--ready)", "ready", ready, totals.ready_pages),
    ...reasons.map((reason) => row(reason, REASONS[reason], `short/${reason}`,
      sum(buckets.map((bucket) => bucket.shortfall_pages[reason] || 0)), totals.shortfall_pages[reason])));
}

function drawStorage(status) {
  const buckets = status.recent.buckets, storage = status.storage, last = buckets.slice(-3), seconds = 3 * status.recent.bucket_ms / 1000;
  by("storage-facts").textContent = `${storage.kind}: ${storage.state} for ${span(storage.since_ms)}; `
    + `about ${size(sum(last.map((bucket) => bucket.read_bytes)) / seconds)}/s read lately, `
    + `errors in five minutes: ${number(sum(buckets.map((bucket) => bucket.errors)))}`;
  const most = columns(by("storage-chart"), buckets, (bucket) => [["var(--accent)", bucket.read_bytes]]);
  by("storage-chart").setAttribute("aria-label", `Bytes read by time, at most ${size(most)} in ${status.recent.bucket_ms / 1000} s`);
  by("storage-table").tBodies[0].replaceChildren(
    row("bytes read", "", "read_bytes", status.totals.read_bytes),
    row("pages read by jobs", "", "loaded", status.totals.loaded_pages),
    row("pages joined", "", "joined", status.totals.joined_pages),
    ...Object.entries(status.totals.errors).map(([kind, count]) => row(`errors: ${kind}`, "", `error/${kind}`, count)));
}

by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", String(paused));
  if (paused) say("Paused; what is shown is old.", false); else look();
});
by("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  token = by("token").value.trim();
  by("token").value = "";
  sessionStorage.setItem("forestage-token", token);
  look();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused && latest) look(); });
addEventListener("resize", () => { if (latest && !by("live").hidden) drawPool(latest); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (latest && !by("live").hidden) drawPool(latest); });
token = takeToken();
if (document.documentElement.dataset.token === "wanted" && !token) askForToken(false); else look();
