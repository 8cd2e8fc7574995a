"use strict";
// Whatever comes from objects becomes text or the value of an attribute, never markup.

const mostRows = 500, mostEndpoints = 40, period = 10000;
const $ = (id) => document.getElementById(id);
let services = [], shown = "";

function element(name, attributes, ...children) {
  const e = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [k, v] of Object.entries(attributes || {})) e.setAttribute(k, v);
  e.append(...children.filter((c) => c !== null && c !== undefined));
  return e;
}

async function ask(what, parameters) {
  const answer = await fetch("v1/" + what + "?" + new URLSearchParams(parameters), { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer.json();
}

// The state of the page is in its address, so that it can be sent to somebody else.
const state = () => new URLSearchParams(location.hash.slice(1));

function go(changes) {
  const s = state();
  for (const [k, v] of Object.entries(changes)) v ? s.set(k, v) : s.delete(k);
  return "#" + s;
}

function age(since) {
  if (!since) return "";
  let s = Math.max(0, Math.round((Date.now() - Date.parse(since)) / 1000));
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60]]) if (s >= 2 * size) return Math.floor(s / size) + unit;
  return s + "s";
}

const portText = (sp) => sp.number + "/" + sp.protocol + (sp.port ? "(" + sp.port + ")" : "");
const stateClass = (s) => ({ programmed: "good", refused: "bad", pending: "wait" })[s] || "";

function row(sp) {
  const service = sp.namespace + "/" + sp.name;
  const cells = [sp.namespace, element("a", { href: go({ service }) }, sp.name), portText(sp), sp.clusterIP,
    [...(sp.loadBalancerIPs || []), ...(sp.externalIPs || [])].join(", "), sp.nodePort,
    element("span", { class: sp.usableEndpoints ? "" : "bad" }, sp.usableEndpoints + "/" + sp.totalEndpoints),
    element("span", { class: stateClass(sp.state) }, sp.state), age(sp.since)];
  return element("tr", {}, ...cells.map((c) => element("td", {}, c ?? "")));
}

function searchText(sp) {
  return [sp.namespace + "/" + sp.name, portText(sp), sp.clusterIP, ...(sp.loadBalancerIPs || []), ...(sp.externalIPs || []), sp.nodePort, sp.state,
    sp.family].join(" ").toLowerCase();
}

function showServices() {
  const words = (state().get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
  const found = services.filter((sp) => { const text = searchText(sp); return words.every((w) => text.includes(w)); });
  $("services").replaceChildren(...found.slice(0, mostRows).map(row));
  $("count").textContent = found.length + " of " + services.length + " Service ports" + (found.length > mostRows ? "; the first " + mostRows + " are shown" : "");
}

function list(diagnoses, severity, title) {
  const of = diagnoses.filter((d) => d.severity === severity);
  if (!of.length) return null;
  return element("div", {}, element("h3", {}, title), element("ul", {}, ...of.map((d) => element("li", { class: severity === "problem" ? "bad" : "" }, d.what,
    d.do ? element("div", { class: "dim" }, "To do: " + d.do) : null))));
}

// The drawing: frontends, what happens to whom there, and endpoints, from left to right.
const columns = [[0, 250], [320, 300], [720, 480]], boxHeight = 40, gap = 12;

function cut(text, width) {
  const most = Math.floor(width / 6.6);
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

function box(column, y, kind, first, second) {
  const [x, width] = columns[column];
  return element("svg:g", { class: kind }, element("svg:title", {}, first + (second ? "\n" + second : "")),
    element("svg:rect", { x: x + 1, y, width, height: boxHeight, rx: 5 }),
    element("svg:text", { x: x + 10, y: y + (second ? 17 : 25) }, cut(first, width - 16)),
    second ? element("svg:text", { x: x + 10, y: y + 33, class: "small" }, cut(second, width - 10)) : null);
}

function line(from, y1, y2, kind) {
  const x1 = columns[from][0] + columns[from][1] + 1, x2 = columns[from + 1][0] + 1, middle = (x1 + x2) / 2, half = boxHeight / 2;
  return element("svg:path", { class: kind, d: `M${x1} ${y1 + half}C${middle} ${y1 + half} ${middle} ${y2 + half} ${x2} ${y2 + half}` });
}

function whyUnused(ep) {
  const reasons = [...new Set(Object.values(ep.unused || {}))];
  if (!reasons.length) return "";
  if ((ep.usedFor || []).length) return Object.entries(ep.unused).map(([p, r]) => "not under " + p + ": " + r).join("; ");
  return "not used: " + reasons.join("; ");
}

function drawing(port) {
  const all = port.endpoints || [], endpoints = all.slice(0, mostEndpoints), top = 26;
  const at = (n) => top + n * (boxHeight + gap);
  const places = new Map(endpoints.map((ep, n) => [ep.address, at(n)]));
  const lines = [], boxes = [];
  let n = 0;
  for (const f of port.frontends || []) {
    const y = at(n), verdicts = f.verdicts || [];
    boxes.push(box(0, y, "frontend", f.frontend, ""));
    for (const v of verdicts) {
      const to = at(n++), forward = v.action === "forward", masqueraded = (v.masqueraded || []).length;
      const what = forward ? "forward" + (masqueraded === (v.endpoints || []).length ? ", masqueraded" : masqueraded ? ", some masqueraded" : "") :
        v.action + ": " + v.reasons.at(-1);
      boxes.push(box(1, to, forward || v.action === "pass" ? "verdict" : "verdict refused", "from " + v.from.join(", "), what));
      lines.push(line(0, y, to, "plain"));
      for (const address of v.endpoints || []) if (places.has(address)) lines.push(line(1, to, places.get(address), ""));
    }
  }
  endpoints.forEach((ep) => {
    const used = (ep.usedFor || []).length > 0;
    const where = [ep.pod, ep.node && "on " + ep.node, ep.zone && "in " + ep.zone].filter(Boolean).join(" ");
    boxes.push(box(2, places.get(ep.address), used ? "endpoint" : "endpoint excluded", ep.address + (where ? "  " + where : ""),
      whyUnused(ep) || (ep.conditions || []).join(", ")));
  });
  let rows = Math.max(n, endpoints.length, 1);
  if (all.length > mostEndpoints) {
    boxes.push(element("svg:text", { x: columns[2][0] + 10, y: at(endpoints.length) + 14, class: "small" }, `and ${all.length - mostEndpoints} more endpoints`));
    rows = Math.max(rows, endpoints.length + 1);
  }
  if (!all.length) boxes.push(element("svg:text", { x: columns[2][0] + 10, y: at(0) + 25, class: "small" }, "no endpoints"));
  const titles = ["Frontend", "Traffic", "Endpoint"].map((t, c) => element("svg:text", { x: columns[c][0] + 1, y: 14, class: "title" }, t));
  const width = columns[2][0] + columns[2][1] + 2, height = at(rows);
  return element("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" }, ...titles, ...lines, ...boxes);
}

function explanation(e) {
  const ports = (e.ports || []).map((p) => element("div", { class: "port" }, element("h3", {}, "Port ", portText(p), ", ", p.family, ": ",
    element("span", { class: stateClass(p.state) }, p.state), p.since ? " for " + age(p.since) : ""),
    element("p", { class: "dim" }, [p.targetPort && "to port " + p.targetPort + " of the Pods", "internalTrafficPolicy " + p.internalTrafficPolicy,
      p.externalTrafficPolicy && "externalTrafficPolicy " + p.externalTrafficPolicy,
      p.sessionAffinityTimeoutSeconds && "ClientIP affinity of " + p.sessionAffinityTimeoutSeconds + "s"].filter(Boolean).join(", ")), drawing(p)));
  const diagnoses = e.diagnoses || [];
  return [element("h2", {}, e.namespace + "/" + e.name, " ", element("a", { href: go({ service: "" }) }, "close")),
    element("p", { class: "dim" }, [e.type, e.selector && "selector " + e.selector, "on node " + e.node, e.zone && "zone " + e.zone].filter(Boolean).join(", ")),
    list(diagnoses, "problem", "What is wrong"), ...ports, list(diagnoses, "note", "What to know"),
    diagnoses.length ? null : element("p", { class: "good" }, "Nothing is wrong with it on this node.")].filter(Boolean);
}

async function showExplanation() {
  const service = state().get("service") || "", slash = service.indexOf("/");
  $("explanation").hidden = !service;
  if (!service) { shown = ""; return; }
  const e = await ask("explain", { namespace: service.slice(0, slash), name: service.slice(slash + 1) });
  if (state().get("service") !== service) return; // Another one has been chosen meanwhile.
  $("explanation").replaceChildren(...explanation(e));
  if (shown !== service) window.scrollTo(0, 0);
  shown = service;
}

async function showFindings() {
  const problems = (await ask("findings", {})).filter((f) => f.severity === "problem");
  $("findings").hidden = !problems.length;
  $("findings").replaceChildren(element("h2", {}, "Problems with objects and with the node"), element("ul", {},
    ...problems.map((f) => element("li", { class: "bad" }, [f.object, f.field].filter(Boolean).join(" "), ": ", f.detail, f.effect ? "; " + f.effect : ""))));
}

function seconds(s) {
  return s >= 1 ? s.toFixed(1) + " s" : s >= 0.001 ? (s * 1000).toFixed(s < 0.01 ? 1 : 0) + " ms" : Math.round(s * 1e6) + " µs";
}

// The plot: a bar for each sync, the newest to the right, as high as the logarithm of the time that it took.
const barWidth = 9, plotHeight = 70, mostBars = 120, lowest = 1e-4;

function plot(syncs) {
  const total = (s) => s.took.planSeconds + s.took.writeSeconds + s.took.compareSeconds;
  const highest = Math.max(1e-2, ...syncs.map(total)), scale = (v) => Math.max(2, plotHeight * Math.log10(Math.max(v, lowest) / lowest) / Math.log10(highest / lowest));
  const bars = syncs.map((s, n) => {
    const height = scale(total(s));
    const services = s.services.map((c) => c.namespace + "/" + c.name + " " + c.change);
    const about = [s.reasons.join(", ") + ", " + new Date(s.began).toLocaleTimeString() + ": " + seconds(total(s)),
      `${s.servicePorts.added || 0} Service ports added, ${s.servicePorts.changed || 0} changed, ${s.servicePorts.removed || 0} removed`,
      ...services.slice(0, 10), s.error].filter(Boolean).join("\n");
    return element("svg:g", {}, element("svg:title", {}, about), element("svg:rect", { class: s.error ? "bar failed" : s.services.length ? "bar" : "bar idle",
      x: 60 + n * barWidth, y: 8 + plotHeight - height, width: barWidth - 2, height }));
  });
  const lines = [];
  for (let v = 1e-3; v <= highest; v *= 10) {
    const y = 8 + plotHeight - scale(v);
    lines.push(element("svg:path", { class: "axis", d: `M56 ${y}H${62 + mostBars * barWidth}` }), element("svg:text", { class: "small", x: 0, y: y + 4 }, seconds(v)));
  }
  const width = 62 + mostBars * barWidth, height = plotHeight + 12;
  return element("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" }, ...lines, ...bars);
}

async function showHistory() {
  const all = await ask("history", {}), syncs = all.slice(-mostBars), last = syncs.at(-1);
  $("history").hidden = !last;
  if (!last) return;
  const failed = syncs.filter((s) => s.error);
  $("history").replaceChildren(element("h2", {}, "Syncs"), plot(syncs), element("p", { class: last.error ? "bad" : "dim" },
    `The last ${syncs.length}: ${failed.length} failed, ${syncs.filter((s) => s.services.length).length} changed Services. The latest was ${age(last.last || last.began)} ago`,
    last.error ? " and failed: " + last.error : "."));
}

// attempt shows what fails in place of an error that nobody sees, and goes on.
async function attempt(...parts) {
  const failed = [];
  for (const part of parts) {
    try { await part(); } catch (e) { failed.push(e.message); }
  }
  $("error").hidden = !failed.length;
  $("error").textContent = [...new Set(failed)].join("\n");
}

async function refresh() {
  await attempt(async () => {
    const mode = await fetch("../proxyMode");
    $("about").textContent = "mode " + (await mode.text());
    services = await ask("services", { namespace: "" });
    showServices();
  }, showFindings, showHistory, showExplanation);
  document.body.dataset.loaded = "yes";
}

$("search").addEventListener("input", () => { history.replaceState(null, "", go({ q: $("search").value })); showServices(); });
window.addEventListener("hashchange", () => { $("search").value = state().get("q") || ""; showServices(); attempt(showExplanation); });
$("search").value = state().get("q") || "";
refresh();
setInterval(() => { if (!document.hidden) refresh(); }, period);
