// Formatting of numbers and times.

const NOTHING = "–";

function figure(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return magnitude(Math.round(value));
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size < 1e-3) return value.toExponential(Math.max(0, digits - 3));
  return String(Number(value.toPrecision(digits)));
}

const signed = (value, digits = 3) => (value > 0 ? "+" : "") + figure(value, digits).replace("-", "−");
const share = (value, digits = 0) => (value === null || value === undefined ? NOTHING : `${(100 * value).toFixed(digits)}%`);

// 4 s, 3:07, 2:03:07
function duration(time) {
  if (time === null || time === undefined || !Number.isFinite(time)) return NOTHING;
  if (time === 0) return "0 s";
  if (time < 60) return seconds(Math.max(0, time));
  const whole = Math.round(time);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours >= 48 ? `${(hours / 24).toFixed(1)} days` : hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

function fine(time) {
  if (time === 0) return "0 s";
  return time < 0.1 ? `${(1000 * time).toFixed(time < 0.01 ? 1 : 0)} ms` : seconds(time);
}

function clock(time) {
  const at = new Date(time * 1000);
  const day = at.toDateString() === new Date().toDateString() ? {} : { weekday: "short" };
  return at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...day });
}

// Round tick values between two bounds, about `count` of them.
function roundTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const sizes = [10, 5, 2, 1, 0.5, 0.2, 0.1].map((factor) => factor * power);
  // The step nearest to the wanted number of ticks may leave a single one: an axis needs two.
  for (const step of sizes.slice(sizes.findLastIndex((size) => size >= rough * 0.999))) {
    const ticks = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) ticks.push(Number((at * step).toPrecision(12)));
    if (ticks.length >= 2) return ticks;
  }
  return [low, high];
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) ticks.push(10 ** power);
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  if (inside.length >= 2) return inside.length > 5 ? inside.filter((_, at) => at % Math.ceil(inside.length / 5) === 0) : inside;
  return roundTicks(low, high, 3).filter((tick) => tick > 0);
}
