// Episode of an environment or agent: turns with thinking, calls of tools and their results, rewards and times.

const OUTCOMES = { tool: "result" };

// Section of a sample, null if it has no turns. `reveal` shows a token of this sample.
function episodePart(sample, reveal) {
  const entries = sample.turns ?? [];
  const last = entries.at(-1)?.turn ?? 0;
  if (!last) return null;
  const turns = Array.from({ length: last }, (_, at) => entries.filter(({ turn }) => turn === at + 1));
  const answers = turns.map(([answer]) => answer).filter(Boolean);
  const total = (name) => answers.reduce((sum, answer) => sum + (answer[name] ?? 0), 0);
  const calls = entries.flatMap(({ tool_calls }) => tool_calls ?? []).length;
  const failures = entries.filter(({ failed }) => failed).length;
  const facts = [
    count(last, "turn"),
    `${count(calls, "tool call")}${failures ? `, ${failures} failed` : ""}`,
    `sampling ${fine(total("seconds"))}`,
    `between turns ${fine(total("environment_s"))}`,
    sample.num_parts > 1 ? `this is sample ${sample.part + 1} of ${sample.num_parts} of the episode` : null,
  ];
  return element(
    "section.part",
    { "aria-label": "Episode" },
    element("h3", "Episode"),
    element("p.soft", facts.filter(Boolean).join(" · ")),
    folded("First messages", entries.filter(({ turn }) => turn === 0).map(spokenMessage)),
    turns.map((messages, at) => turnCard(sample, at + 1, messages, reveal)),
  );
}

function turnCard(sample, number, messages, reveal) {
  const answer = messages[0] ?? {};
  const here = answer.sample === sample.part && answer.num_tokens > 0;
  return element(
    "article.turn",
    { "aria-label": `Turn ${number}` },
    element(
      "header.turn-head",
      element("b", `Turn ${number}`),
      typeof answer.reward === "number" ? element("span", { class: `pill ${answer.reward > 0 ? "good" : ""}` }, `reward ${signed(answer.reward)}`) : null,
      element("span", count(answer.num_tokens ?? 0, "token")),
      element("span", `sampled in ${fine(answer.seconds ?? 0)}`),
      answer.environment_s ? element("span", `environment ${fine(answer.environment_s)}`) : null,
      sample.num_parts > 1 ? element("span", `sample ${(answer.sample ?? 0) + 1}`) : null,
      here ? element("button.quiet", { type: "button", onclick: () => reveal(answer.first_token) }, "Tokens") : null,
    ),
    messages.map(spokenMessage),
  );
}

function spokenMessage(entry) {
  const line = (role, kind, ...body) =>
    element("div", { class: `message ${kind}` }, element("span.role", role), element("div.prose", ...body));
  const calls = (entry.tool_calls ?? []).map((call) => line("calls", "call", element("b", call.name), ` ${call.arguments ?? ""}`));
  const outcome = entry.role === "tool" && [entry.name, entry.seconds === null ? null : fine(entry.seconds)].filter(Boolean).join(", ");
  return [
    entry.reasoning ? line("thinking", "thinking", entry.reasoning) : null,
    entry.content || (!calls.length && !entry.reasoning)
      ? line(
          OUTCOMES[entry.role] ?? entry.role,
          entry.failed ? "failed" : (OUTCOMES[entry.role] ?? ""),
          outcome ? element("span.outcome", entry.failed ? `${outcome}: failed` : outcome) : null,
          entry.content || "(nothing)",
        )
      : null,
    calls,
  ];
}
