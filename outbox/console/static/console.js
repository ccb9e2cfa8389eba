// Everything works without this script; with it, pages refresh themselves, confirm in a dialog, and obey the keyboard.
(() => {
  "use strict";
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const one = (selector, within = document) => within.querySelector(selector);
  const stored = (storage, name, value) => {
    // A browser may forbid storage: then nothing is remembered.
    try {
      if (value === undefined) return storage().getItem(name);
      storage().setItem(name, value);
    } catch { /* not remembered */ }
    return value ?? null;
  };
  const theme = (value) => stored(() => localStorage, "outbox-theme", value);
  const pace = (value) => stored(() => sessionStorage, "outbox-refresh", value);

  // Before the first paint.
  const applyTheme = (name) => { if (name) root.dataset.theme = name; else delete root.dataset.theme; };
  applyTheme(theme());
  root.classList.add("js");

  const write = (selector, text) => all(selector).forEach((at) => { at.textContent = text; });
  const say = (text) => write("#announcer", text);

  // --- theme, copying ------------------------------------------------------------------------------------------
  const THEMES = { "": "light", light: "dark", dark: "" };
  const nameTheme = () => write("[data-theme-name]", root.dataset.theme || "auto");
  const nextTheme = () => { const next = THEMES[root.dataset.theme || ""]; theme(next); applyTheme(next); nameTheme(); };

  const copy = async (text) => {
    // Over plain http there is no clipboard but the old one.
    if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea");
    area.value = text;
    (one("dialog[open]") || document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("not copied");
  };

  // --- times ---------------------------------------------------------------------------------------------------
  // By the server's clock: that of this machine may be wrong.
  let skew = 0;
  const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const relative = (at) => {
    const seconds = Math.round((Date.now() + skew - at) / 1000);
    const size = Math.abs(seconds);
    const [unit, length] = UNITS.find(([, each]) => size >= each) || ["s", 1];
    const text = `${Math.floor(size / length)} ${unit}`;
    return size < 1 ? "now" : seconds < 0 ? `in ${text}` : `${text} ago`;
  };
  const showTimes = (within = document) => {
    for (const time of all("time[datetime]", within)) {
      const at = Date.parse(time.dateTime);
      const rel = time.nextElementSibling;
      if (rel?.classList.contains("rel")) rel.textContent = relative(at);
      if (!time.title) time.title = `${new Date(at).toLocaleString()} here`;
    }
  };

  // --- selection -----------------------------------------------------------------------------------------------
  const boxes = () => all(".rows tbody .pick input");
  const chosen = () => boxes().filter((box) => box.checked);
  let lastBox = null;
  const countChosen = () => {
    const count = chosen().length;
    write("[data-chosen]", count ? `${count} selected` : "Nothing selected");
    const every = one("[data-pick-all]");
    if (every) { every.checked = count > 0 && count === boxes().length; every.indeterminate = count > 0 && !every.checked; }
    if (!count) all("[name=all]").forEach((box) => { box.checked = false; });
  };
  const clearChosen = () => { boxes().forEach((box) => { box.checked = false; }); countChosen(); };

  // --- live regions --------------------------------------------------------------------------------------------
  let refreshedAt = Date.now();
  let notBefore = 0;
  let failing = false;
  const MOST_ROUNDS = 100;
  const dialog = () => one("#dialog");
  const typing = () => document.activeElement?.matches("main :is(textarea, select, input:not([type=checkbox]))");
  const pause = () => {
    if (document.hidden) return "paused: not in view";
    if (dialog()?.open) return "paused: a dialog is open";
    const count = chosen().length;
    if (count) return `paused: ${count} selected`;
    if (search) return `${search.done ? "searched" : "searching:"} ${search.seen.toLocaleString("en")}`;
    return typing() ? "paused: you are typing" : "";
  };
  const refresh = (byHand) => {
    refreshedAt = Date.now();
    for (const region of all("[data-live]")) {
      // Details that the user has opened stay as they are.
      if (one("details[open], :popover-open", region) && !byHand) continue;
      if (!one(":scope.htmx-request", region.parentNode)) window.htmx?.trigger(region, "refresh");
    }
  };
  const showPace = () => {
    const why = pause();
    const seconds = Math.round((Date.now() - refreshedAt) / 1000);
    write("[data-updated]", failing ? "can’t be reached" : why || (seconds < 2 ? "just updated" : `updated ${seconds} s ago`));
    return why;
  };
  const tick = () => {
    const why = showPace();
    const every = Number(one("#pace")?.value || 0) * 1000;
    if (every && !why && Date.now() - refreshedAt >= every && Date.now() >= notBefore) refresh();
  };
  const stale = (is) => {
    failing = is;
    all("[data-live]").forEach((region) => region.classList.toggle("stale", is));
    all("#stale").forEach((banner) => { banner.hidden = !is; });
  };

  // A table that the user reads keeps its rows in their order: new ones are counted, and shown on request.
  const keepRows = (region, fragment) => {
    const table = one("table[data-steady]", region);
    const fresh = one("table[data-steady]", fragment);
    if (!table || !fresh || !one("tbody tr", table)) return;
    const body = one("tbody", fresh);
    const now = new Map(all("tr", body).map((row) => [row.id, row]));
    const before = all("tbody tr", table);
    const known = new Set(before.map((row) => row.id));
    const fell = before.findLastIndex((row) => now.has(row.id));
    const count = [...now.keys()].filter((id) => !known.has(id)).length;
    body.replaceChildren(...before.map((row, place) => {
      if (now.has(row.id)) return now.get(row.id);
      const old = row.cloneNode(true);
      // Above what is still there it has left the list; below it was only pushed to the next page.
      old.classList.toggle("gone", place < fell);
      return old;
    }));
    const notice = one("[data-fresh]", fragment);
    if (notice && count) { notice.hidden = false; notice.textContent = `${count} new – show`; }
  };

  document.addEventListener("htmx:before:swap", (event) => {
    const { ctx, tasks } = event.detail;
    const region = ctx.sourceElement;
    if (!region?.matches?.("[data-live]")) return;
    const found = tasks[0]?.fragment?.firstElementChild;
    if (ctx.response.status >= 400 || !found) {
      // The rows shown stay, marked as old.
      event.preventDefault();
      const wait = Number(ctx.response.headers.get("Retry-After"));
      notBefore = Date.now() + 1000 * (wait > 0 ? wait : 10);
      stale(true);
      return;
    }
    if (pause() && !region.dataset.byHand) { event.preventDefault(); return; }
    stale(false);
    keepRows(region, tasks[0].fragment);
  });
  document.addEventListener("htmx:error", (event) => {
    if (event.detail.ctx?.sourceElement?.matches?.("[data-live]")) { notBefore = Date.now() + 10000; stale(true); }
  });

  // --- a search that has used up its budget goes on by itself, one request after the other --------------------------
  let search = null;
  const goOn = async () => {
    const [first, list] = [one("[data-further]"), one("#rows")];
    if (!first || !list) return;
    search = { seen: Number(first.dataset.further), stop: new AbortController(), done: false };
    try {
      for (let round = 0, link = first; link && round < MOST_ROUNDS && all("tbody tr", list).length < link.dataset.size; round += 1) {
        one("[data-stop]", list).hidden = false;
        showPace();
        const answer = await fetch(link.href, { signal: search.stop.signal });
        const next = one("#rows", new DOMParser().parseFromString(await answer.text(), "text/html"));
        if (!answer.ok || !next) break;
        link = one("[data-further]", next);
        search.seen += Number(link?.dataset.further || 0);
        const [body, rows] = [one("tbody", list), all("tbody tr", next)];
        if (!body) list.replaceChildren(...next.childNodes);
        else {
          body.append(...rows);
          one(".foot", list).replaceWith(one(".foot", next));
          one(".foot > span", list).textContent = `${all("tr", body).length} found`;
        }
        showTimes(list);
      }
    } catch { /* stopped, or the console can't be reached: the link goes on */ }
    search.done = true;
    all("[data-stop]").forEach((button) => { button.hidden = true; });
    say(`${all("tbody tr", list).length} found`);
    showPace();
  };

  // --- a question in the dialog: what is wrong with it stays there, what was done leads on to its page ---------------
  const ask = () => {
    dialog().setAttribute("aria-labelledby", "ask-title");
    // A menu closes under the dialog: the focus comes back to its button.
    const sheet = document.activeElement?.closest(".sheet");
    if (sheet) one(`[popovertarget="${sheet.id}"]`)?.focus();
    if (!dialog().open) dialog().showModal();
    (one("[autofocus]", dialog()) || one("button, a, input", dialog()))?.focus();
    say(one("[role=alert]", dialog())?.textContent.trim() || "");
  };
  const load = async (url, options = {}) => {
    const answer = await fetch(url, options);
    const next = one("#ask", new DOMParser().parseFromString(await answer.text(), "text/html"));
    if (answer.redirected || !next) { location.assign(answer.url); return; }
    dialog().replaceChildren(next);
    ask();
  };
  const send = (form, by) => {
    const [action, method] = ["action", "method"].map((name) => by?.getAttribute(`form${name}`) || form.getAttribute(name));
    const fields = new URLSearchParams(new FormData(form, by));
    return method === "get" ? load(`${action}?${fields}`) : load(action, { method, body: fields });
  };
  const unsent = (form) => {
    if (!one(":scope > .unsent", form)) form.prepend(one("#unsent").content.cloneNode(true));
    say(one(".unsent", form).textContent.trim());
  };

  document.addEventListener("htmx:after:swap", (event) => {
    // A user that walks through the rows by keys goes on at the focus: the server doesn't know which row that was.
    const row = document.activeElement?.closest(".rows tbody tr");
    if (row && !current()) row.classList.add("at");
    showTimes();
    countChosen();
  });

  // --- rows by keyboard ----------------------------------------------------------------------------------------
  const step = (by) => {
    const rows = all(".rows tbody tr");
    if (!rows.length) return;
    const at = rows.findIndex((row) => row.classList.contains("at"));
    const next = rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? 0 : at + by))];
    rows.forEach((row) => row.classList.toggle("at", row === next));
    one("a[href]", next)?.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  };
  const current = () => one(".rows tr.at");
  let going = 0;
  const KEYS = {
    "/": () => one("#jump")?.focus(),
    j: () => step(1),
    k: () => step(-1),
    x: () => one(".pick input", current() || document.createElement("i"))?.click(),
    Enter: () => one("a[href]", current() || document.createElement("i"))?.click(),
    r: () => { clearChosen(); refresh(true); },
    t: nextTheme,
    "?": () => {
      const help = one("#keys");
      if (!help || !dialog()) return;
      dialog().replaceChildren(help.content.cloneNode(true));
      dialog().setAttribute("aria-labelledby", "keys-title");
      dialog().showModal();
    },
    g: () => { going = Date.now(); },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.key === "Escape" && !dialog()?.open) { clearChosen(); document.activeElement?.blur(); return; }
    if (dialog()?.open || event.target.matches("input:not([type=checkbox]), select, textarea")) return;
    if (event.key === "Enter" && event.target.matches("a, button, summary, input")) return;
    const go = Date.now() - going < 1500 && one(`[data-go="${CSS.escape(event.key)}"]`);
    going = 0;
    if (go) { event.preventDefault(); go.click(); return; }
    const act = KEYS[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  document.addEventListener("click", (event) => {
    const at = (selector) => event.target.closest?.(selector);
    const box = at(".pick input");
    if (box && !box.matches("[data-pick-all]")) {
      const list = boxes();
      if (event.shiftKey && lastBox) {
        const [from, to] = [list.indexOf(lastBox), list.indexOf(box)].sort((a, b) => a - b);
        if (from >= 0) list.slice(from, to + 1).forEach((each) => { each.checked = box.checked; });
      }
      lastBox = box;
    }
    const link = at("[data-ask]");
    if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault();
      load(link.href).catch(() => location.assign(link.href));
    }
    if (at("[data-close]") && dialog()?.open) { event.preventDefault(); dialog().close(); }
    if (at("[data-clear]")) clearChosen();
    if (at("[data-stop]")) search.stop.abort();
    if (at("[data-theme-next]")) nextTheme();
    if (at("[data-refresh]")) refresh(true);
    if (at("[data-fresh]")) location.reload();
    const source = at("[data-copy]");
    if (source) {
      copy(source.dataset.copy).then(() => { say("Copied."); source.classList.add("done"); }, () => say("Could not copy."));
      setTimeout(() => source.classList.remove("done"), 1500);
    }
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-pick-all]")) boxes().forEach((box) => { box.checked = event.target.checked; });
    if (event.target.matches(".pick input, [data-pick-all]")) { countChosen(); showPace(); }
    if (event.target.matches("#pace")) { pace(event.target.value); tick(); }
    if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
  });
  document.addEventListener("submit", (event) => {
    const form = event.target;
    const asks = form.matches("dialog form, .bulk");
    if (!asks && form.getAttribute("method") !== "post") return;
    // A second click must not act twice.
    if (asks || form.dataset.sent) event.preventDefault();
    if (form.dataset.sent) return;
    form.dataset.sent = "yes";
    if (asks) send(form, event.submitter).catch(() => unsent(form)).finally(() => { delete form.dataset.sent; });
  });
  // Back from the next page, forms can be sent again.
  window.addEventListener("pageshow", () => all("[data-sent]").forEach((form) => { delete form.dataset.sent; }));
  document.addEventListener("visibilitychange", tick);

  document.addEventListener("DOMContentLoaded", () => {
    skew = Date.parse(document.body.dataset.now) - Date.now() || 0;
    all("#pace").forEach((select) => { select.value = pace() ?? select.value; });
    const flash = one("#flash");
    if (flash) {
      say(flash.textContent.trim());
      // A reload hasn't done it again.
      const url = new URL(location.href);
      url.searchParams.delete("did");
      history.replaceState(null, "", url);
    }
    nameTheme();
    showTimes();
    countChosen();
    tick();
    goOn();
    setInterval(() => { tick(); showTimes(); }, 1000);
  });
})();
