function (root, data) {
  "use strict";
  const find = (name) => root.querySelector(".tti-" + name);
  const rowsBox = find("rows"), stripsBox = find("strips"), detail = find("detail"), select = root.querySelector("select");
  let group = null;
  let marks = []; // for each shared token the elements that show it
  let pinned = null; // the element that has the focus

  function make(parent, tag, classes, text) {
    const element = document.createElement(tag);
    if (classes) element.className = classes;
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function signed(value, digits) {
    const text = Math.abs(value).toFixed(digits);
    return (Number(text) === 0 ? "" : value < 0 ? "−" : "+") + text;
  }

  const plural = (count, word) => count + " " + word + (count === 1 ? "" : "s");
  const visible = (text) => text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
  const quoted = (text) => text === "" ? "(part of a character)" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +$|^ | $/g, (s) => "␣".repeat(s.length));

  // Magnitude against the plain weight of the row: 0 none, about 1 plain, about 2 strong.
  function look(weight, plain) {
    const size = Math.abs(weight) / plain;
    if (size < 0.02) return "tti-none";
    return (weight > 0 ? "tti-up" : "tti-down") + (size < 0.5 ? " tti-faint" : size < 1.5 ? " tti-plain" : " tti-strong");
  }

  function sharedOf(token) { return token.shared.map((index) => group.shared[index]); }

  function describeShared(shared) {
    const where = shared.side === "prefix" ? "token " + (shared.position + 1) + " of the shared prefix"
      : "token " + (shared.position + 1) + " from the end, shared suffix";
    return where + ", held by " + plural(shared.above, "completion") + " above the mean and " + shared.below + " below: sum "
      + signed(shared.before, 2) + " by plain advantages, " + signed(shared.after, 2) + " by " + group.method
      + (shared.protected ? " (protected)" : "");
  }

  function describe(token) {
    if (token.column) return describeShared(group.shared[token.shared[0]]);
    const row = token.row, i = token.index, parts = ["completion " + row.number + ", token " + (i + 1), "id " + row.ids[i]];
    parts.push("weight " + signed(row.weights[i], 4) + (row.kept ? "" : " (" + row.state + ")"));
    if (row.lambdas) parts.push("λ " + row.lambdas[i]);
    if (row.entropies) parts.push("entropy " + row.entropies[i].toFixed(3) + " nats");
    return parts.concat(sharedOf(token).map(describeShared)).join("; ");
  }

  function show(element) {
    marks.flat().forEach((other) => other.classList.remove("tti-same"));
    if (!element) return;
    const token = element.token;
    token.shared.forEach((index) => marks[index].forEach((other) => other.classList.add("tti-same")));
    detail.replaceChildren();
    make(detail, "b", "", quoted(token.text));
    detail.append(" " + describe(token));
  }

  // One tab stop a list: arrow keys move inside it.
  function listen(list) {
    list.addEventListener("keydown", (event) => {
      const items = list.items, now = items.indexOf(document.activeElement);
      if (now < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
      const lists = [...rowsBox.querySelectorAll(".tti-text-block")], place = lists.indexOf(list);
      let target = null;
      if (event.key === "ArrowRight") target = items[now + 1];
      else if (event.key === "ArrowLeft") target = items[now - 1];
      else if (event.key === "Home") target = items[0];
      else if (event.key === "End") target = items[items.length - 1];
      else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        const other = place < 0 ? undefined : lists[place + (event.key === "ArrowDown" ? 1 : -1)];
        if (other) target = other.items[Math.min(now, other.items.length - 1)];
      } else return;
      event.preventDefault();
      if (target) target.focus();
    });
    list.addEventListener("focusin", (event) => {
      const element = event.target;
      if (!element.token) return;
      list.items.forEach((item) => { if (item.tabIndex === 0) item.tabIndex = -1; });
      element.tabIndex = 0;
      element.setAttribute("aria-label", quoted(element.token.text) + ": " + describe(element.token));
      pinned = element;
      show(element);
    });
    list.addEventListener("focusout", () => { pinned = null; });
    list.addEventListener("pointerover", (event) => {
      const element = event.target.closest(".tti-token, .tti-column");
      if (element) show(element);
    });
    list.addEventListener("pointerleave", () => show(pinned));
  }

  function addItem(list, element, token) {
    element.token = token;
    element.tabIndex = list.items.length ? -1 : 0;
    element.setAttribute("role", "option");
    list.items.push(element);
    token.shared.forEach((index) => marks[index].push(element));
  }

  function makeList(parent, classes, label) {
    const list = make(parent, "div", classes);
    list.setAttribute("role", "listbox");
    list.setAttribute("aria-label", label);
    list.setAttribute("aria-orientation", "horizontal");
    list.items = [];
    listen(list);
    return list;
  }

  function drawStrip(side, title) {
    const places = group.shared.map((shared, index) => [shared, index]).filter(([shared]) => shared.side === side);
    if (!places.length) return;
    if (side === "suffix") places.reverse();
    const largest = Math.max(...group.shared.map((s) => Math.max(Math.abs(s.before), Math.abs(s.after))), 1e-9);
    const box = make(stripsBox, "div", "tti-side");
    make(box, "h4", "", title);
    const list = makeList(box, "tti-strip", title);
    places.forEach(([shared, index]) => {
      const column = make(list, "div", "tti-column");
      make(column, "div", "tti-text", quoted(shared.text));
      const bars = make(column, "div", "tti-bars");
      [["before", shared.before], ["after", shared.after]].forEach(([name, value]) => {
        const sign = Math.abs(value) < 0.005 ? "zero" : value > 0 ? "up" : "down";
        const bar = make(bars, "span", "tti-bar tti-" + name + " tti-" + sign);
        bar.style.setProperty("--size", 50 * Math.abs(value) / largest + "%");
      });
      make(column, "div", "tti-sums", signed(shared.before, 1) + " → " + signed(shared.after, 1));
      make(column, "div", "tti-why", shared.protected ? "protected" : "as it is");
      addItem(list, column, { column: true, text: shared.text, shared: [index] });
    });
  }

  function drawRow(row) {
    const box = make(rowsBox, "article", "tti-row" + (row.advantage > 0 ? " tti-up" : row.advantage < 0 ? " tti-down" : ""));
    const head = make(box, "div", "tti-head");
    make(head, "strong", "", "Completion " + row.number);
    make(head, "span", "tti-state" + (row.state.length > 8 ? " tti-long" : ""), row.state);
    const facts = make(head, "dl");
    const fact = (name, value) => { make(facts, "dt", "", name); make(facts, "dd", "", value); };
    const number = (value) => value === null ? "none" : String(Number(value.toFixed(3))).replace("-", "−");
    const parts = Object.entries(row.rewards).map(([name, value]) => name + " " + number(value));
    fact("reward", number(row.reward) + (parts.length ? " (" + parts.join(", ") + ")" : ""));
    fact("advantage", row.advantage === null ? "none" : signed(row.advantage, 2));
    fact("length", plural(row.tokens.length, "token") + (row.truncated ? ", truncated" : ""));
    if (row.entropy !== null) fact("entropy", row.entropy.toFixed(3) + " nats a token");
    const label = "Completion " + row.number + ", " + row.state + ", reward " + number(row.reward);
    const list = makeList(box, "tti-text-block", label);
    row.tokens.forEach((text, i) => {
      const element = make(list, "span", "tti-token " + look(row.weights[i], row.plain), text === "" ? "▯" : visible(text));
      if (text === "") element.classList.add("tti-part");
      addItem(list, element, { row: row, index: i, text: text, shared: row.places.get(i) || [] });
    });
  }

  function draw(index) {
    group = data.groups[index];
    marks = group.shared.map(() => []);
    pinned = null;
    rowsBox.replaceChildren();
    stripsBox.replaceChildren();
    find("headline").textContent = group.headline;
    find("notes").replaceChildren(...group.notes.map((note) => { const li = document.createElement("li"); li.textContent = note; return li; }));
    find("prompt").hidden = !group.prompt;
    find("prompt").querySelector("pre").textContent = group.prompt;
    find("shared").hidden = !group.shared.length;
    find("explain").textContent = "Tokens that completions above and below the group's mean hold at the same place, in an unbroken run from the "
      + "beginning or the end. Left, hollow: the sum "
      + "of the plain advantages that reach the token; right, filled: what " + group.method + " makes of it. Below the line (dashed) "
      + "the token is pushed down.";
    group.rows.forEach((row) => { row.places = new Map(); });
    group.shared.forEach((shared, number) => shared.rows.forEach((place) => {
      const row = group.rows[place];
      const i = shared.side === "prefix" ? shared.position : row.tokens.length - 1 - shared.position;
      row.places.set(i, (row.places.get(i) || []).concat(number));
    }));
    drawStrip("prefix", "Shared prefix");
    drawStrip("suffix", "Shared suffix");
    group.rows.forEach(drawRow);
  }

  data.groups.forEach((one, index) => { make(select, "option", "", one.name).value = index; });
  select.value = data.selected;
  select.disabled = data.groups.length < 2;
  select.addEventListener("change", () => draw(Number(select.value)));
  draw(data.selected);
}
