// SPDX-License-Identifier: Apache-2.0
// What is drawn across a chart: what happened, the limit, and the moment that is looked at.

const KINDS = {
  started: { colour: "--muted", dash: [2, 3] },
  ended: { colour: "--text", dash: [] },
  "growth began": { colour: "--alarm", dash: [6, 3] },
  "growth ended": { colour: "--ok", dash: [6, 3] },
  patch: { colour: "--info", dash: [2, 3] },
};
const OTHER = { colour: "--muted", dash: [1, 3] };
const ROWS = 3;

export const isKnownMark = (kind) => Object.hasOwn(KINDS, kind);

export function drawMarks(u, marks, css) {
  const { ctx, bbox, scales } = u;
  const ratio = devicePixelRatio;
  const ends = new Array(ROWS).fill(-Infinity);
  ctx.save();
  ctx.font = `${11 * ratio}px ${css("--font")}`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  const seen = marks.filter((mark) => mark.time_unix_s >= scales.x.min && mark.time_unix_s <= scales.x.max);
  const placed = seen
    .sort((a, b) => a.time_unix_s - b.time_unix_s)
    .map((mark) => {
      const style = isKnownMark(mark.kind) ? KINDS[mark.kind] : OTHER;
      return {
        mark,
        x: Math.round(u.valToPos(mark.time_unix_s, "x", true)) + 0.5,
        colour: css(style.colour),
        dash: style.dash,
      };
    });
  for (const { x, colour, dash } of placed) {
    ctx.strokeStyle = colour;
    line(ctx, x, bbox, dash, ratio);
  }
  const ground = css("--card");
  for (const { mark, x, colour } of placed) {
    const label = String(mark.kind).slice(0, 20);
    const width = ctx.measureText(label).width + 8 * ratio;
    const left = x + width > bbox.left + bbox.width ? x - width : x;
    const row = ends.findIndex((end) => end <= left);
    if (row < 0) continue; // it stands in the list of events
    ends[row] = left + width;
    ctx.fillStyle = ground;
    ctx.fillRect(left + 2 * ratio, bbox.top + row * 13 * ratio, width - 4 * ratio, 14 * ratio);
    ctx.fillStyle = colour;
    ctx.fillText(label, left + 4 * ratio, bbox.top + (2 + row * 13) * ratio);
  }
  ctx.restore();
}

export function drawMoment(u, at, css) {
  if (at === null || at < u.scales.x.min || at > u.scales.x.max) return;
  const { ctx, bbox } = u;
  const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--focus");
  line(ctx, x, bbox, [], devicePixelRatio, 2);
  const wing = 5 * devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(x - wing, bbox.top + bbox.height);
  ctx.lineTo(x + wing, bbox.top + bbox.height);
  ctx.lineTo(x, bbox.top + bbox.height - 1.5 * wing);
  ctx.fill();
  ctx.restore();
}

export function drawLimit(u, limit, css) {
  if (!limit || limit.value > u.scales.y.max) return;
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  const y = Math.round(u.valToPos(limit.value, "y", true));
  ctx.save();
  ctx.strokeStyle = css("--alarm");
  ctx.lineWidth = 2 * ratio;
  ctx.setLineDash([12 * ratio, 4 * ratio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `${12 * ratio}px ${css("--font")}`;
  ctx.textAlign = "right";
  ctx.textBaseline = "top";
  const isHigh = y - bbox.top < 24 * ratio;
  const right = bbox.left + bbox.width - 6 * ratio;
  const top = isHigh ? y + 4 * ratio : y - 16 * ratio;
  const width = ctx.measureText(limit.label).width;
  ctx.fillStyle = css("--card");
  ctx.fillRect(right - width - 4, top - 1, width + 8, 14 * ratio);
  ctx.fillStyle = css("--alarm");
  ctx.fillText(limit.label, right, top);
  ctx.restore();
}

function line(ctx, x, bbox, dash, ratio, width = 1) {
  ctx.lineWidth = width * ratio;
  ctx.setLineDash(dash.map((part) => part * ratio));
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
}
