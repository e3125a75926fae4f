/* Draws the pictures of a report. The numbers come from the block "pictures"; whatever text is
   among them is a stranger's, and gets into the page as text only. */
(function () {
'use strict';

var pictures = JSON.parse(document.getElementById('pictures').textContent);
var darkness = matchMedia('(prefers-color-scheme: dark)');
var printing = false;
var drawn = [];

/* Colours that are told apart with any sight (Okabe and Ito); what matters has a pattern, too. */
var PART = {computing: '#0072b2', waiting: '#e69f00', data: '#cc79a7', moving: '#56b4e9',
  saving: '#009e73', other: '#999999'};
var LINES = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#7f7f7f', '#8a2be2'];
var SYMBOLS = ['circle', 'rect', 'triangle', 'diamond'];
var DASHES = ['solid', 'dashed', 'dotted'];
var MARK = {checkpoint: ['#009e73', 'checkpoint'], lost: ['#d00000', 'lost'],
  failed: ['#d00000', 'failed'], back: ['#0b7a3b', 'back']};
var MOOD = {bad: '#d00000', good: '#0b7a3b', slow: '#b35900', note: '#6a737d'};

function theme() {
  var dark = darkness.matches && !printing;
  return {dark: dark, ink: dark ? '#e6edf3' : '#1b1f24', soft: dark ? '#9aa5b1' : '#57606a',
    line: dark ? '#3d444d' : '#d0d7de', paper: dark ? '#0d1117' : '#ffffff',
    card: dark ? '#161b22' : '#f6f8fa'};
}

function hatch(colour, angle, gap) {
  return {symbol: 'rect', symbolSize: 1, dashArrayX: [1, 0], dashArrayY: [2, gap || 4],
    rotation: angle === undefined ? -Math.PI / 4 : angle, color: colour};
}
function decalOf(part) {
  if (part === 'waiting') return hatch('rgba(0,0,0,.45)');
  if (part === 'data') return hatch('rgba(0,0,0,.35)', Math.PI / 4, 3);
  if (part === 'saving') return hatch('rgba(255,255,255,.5)', 0, 3);
  return undefined;
}

function element(text) {
  var box = document.createElement('div');
  box.style.maxWidth = '22rem';
  box.style.whiteSpace = 'pre-wrap';
  box.style.overflowWrap = 'anywhere';
  box.textContent = text;
  return box;
}
function number(value) {
  var size = Math.abs(value);
  if (value === 0) return '0';
  if (size >= 1e6) return (+value.toPrecision(4)).toExponential().replace('e+', 'e');
  return String(+value.toPrecision(size < 1e-3 ? 4 : 5));
}
function lasting(seconds) {  /* as spec/formatting.py formats it */
  if (seconds < 5e-6) return '0 s';
  if (seconds < 0.09995) return +(1e3 * seconds).toPrecision(3) + ' ms';
  if (seconds < 99.5) return +seconds.toPrecision(seconds < 0.9995 ? 3 : 2) + ' s';
  var units = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  for (var at = 0; at < 3; at++) {
    var part = units[at + 1][0], whole = Math.round(seconds / part), size = units[at][0] / part;
    var count = Math.floor(whole / size), rest = whole % size;
    if (count >= (at ? 1 : 2)) {
      return count + ' ' + units[at][1] + (rest ? ' ' + rest + ' ' + units[at + 1][1] : '');
    }
  }
}
function axisTime(seconds, whole) {
  if (whole < 200) return +seconds.toFixed(1) + ' s';
  if (whole < 10800) return +(seconds / 60).toFixed(1) + ' min';
  return +(seconds / 3600).toFixed(2) + ' h';
}
function cut(text, most) { return text.length > most ? text.slice(0, most - 1) + '…' : text; }

function base(look, picture) {
  return {
    animation: false, backgroundColor: 'transparent',
    textStyle: {color: look.ink, fontFamily: 'system-ui, "DejaVu Sans", sans-serif'},
    aria: {enabled: true, label: {description: picture.title}, decal: {show: false}},
    tooltip: {confine: true, backgroundColor: look.card, borderColor: look.line,
      textStyle: {color: look.ink, fontSize: 13}}
  };
}
function axis(look, more) {
  var found = {axisLine: {lineStyle: {color: look.soft}}, axisLabel: {color: look.soft, hideOverlap: true},
    splitLine: {lineStyle: {color: look.line}}, nameTextStyle: {color: look.soft}};
  for (var name in more) found[name] = more[name];
  return found;
}

/* -- curves over steps or seconds ---------------------------------------------------------- */

function curves(picture, look, width) {
  var option = base(look, picture), low = Infinity, high = -Infinity, narrow = width < 560;
  picture.series.forEach(function (one) {
    one.points.forEach(function (point) {
      low = Math.min(low, point[1]); high = Math.max(high, point[1]);
    });
  });
  var log = low > 0 && high / low > 300;
  var longest = Math.max.apply(null, picture.series.map(function (one) { return one.name.length; }));
  var ends = picture.series.map(function (one) {
    return one.points.length ? one.points[one.points.length - 1][1] : 0;
  }).sort(function (a, b) { return a - b; });
  var near = ends.some(function (end, at) { return at && end - ends[at - 1] < 0.07 * (high - low); });
  narrow = narrow || near || log;  /* labels at the ends would lie over each other */
  option.grid = {left: 12, right: narrow ? 18 : Math.min(220, 24 + 7.5 * longest), top: narrow && picture.series.length > 1 ? 52 : 34,
    bottom: 34, containLabel: true};
  option.xAxis = axis(look, {type: 'value', name: picture.over === 'step' ? 'step' : 'seconds',
    nameLocation: 'middle', nameGap: 26, min: picture.over === 'step' ? 'dataMin' : 0, max: 'dataMax',
    axisLabel: {color: look.soft, hideOverlap: true, showMinLabel: true, showMaxLabel: true, formatter: function (at) {
      return number(picture.over === 'step' ? at : +at.toFixed(1));
    }}});
  var flat = low === high ? 0.1 * Math.max(Math.abs(low), 1e-9) : 0;  /* else the axis would be far too wide */
  option.yAxis = axis(look, {type: log ? 'log' : 'value', scale: true,
    min: flat ? low - flat : null, max: flat ? high + flat : null, interval: flat || null,
    name: picture.metric + (log ? ' (logarithmic)' : ''), nameTextStyle: {color: look.soft, align: 'left'},
    axisLabel: {color: look.soft, formatter: number}});
  if (narrow && picture.series.length > 1) {
    option.legend = {top: 0, right: 0, textStyle: {color: look.ink}, type: 'scroll', itemWidth: 34};
  }
  option.tooltip.trigger = 'axis';
  option.tooltip.formatter = function (items) {
    var head = (picture.over === 'step' ? 'step ' : '') + number(items[0].value[0]) +
      (picture.over === 'step' ? '' : ' s');
    return element([head].concat(items.map(function (item) {
      return item.seriesName + ': ' + number(item.value[1]);
    })).join('\n'));
  };
  option.dataZoom = [{type: 'inside', zoomOnMouseWheel: 'ctrl', moveOnMouseMove: true, filterMode: 'none'}];
  option.series = picture.series.map(function (one, at) {
    return {type: 'line', name: one.name, data: one.points, color: LINES[at % LINES.length],
      symbol: SYMBOLS[at % SYMBOLS.length], symbolSize: 7, showSymbol: one.points.length <= 40,
      lineStyle: {type: DASHES[at % DASHES.length], width: 2},
      endLabel: {show: !narrow, formatter: cut(one.name, 26), color: look.ink, distance: 8},
      labelLayout: {moveOverlap: 'shiftY'}};
  });
  return option;
}

/* -- how the steps of each rank divide ------------------------------------------------------ */

function division(picture, look, width) {
  var option = base(look, picture), narrow = width < 560;
  option.grid = {left: 8, right: 24, top: narrow ? 8 : 8, bottom: 34, containLabel: true};
  option.xAxis = axis(look, {type: 'value', name: 'ms of a step', nameLocation: 'middle', nameGap: 24});
  option.yAxis = axis(look, {type: 'category', inverse: true,
    axisLabel: {color: look.ink, width: narrow ? 110 : 220, overflow: 'truncate'},
    data: picture.rows.map(function (row) { return row[0]; })});
  option.tooltip.trigger = 'item';
  option.tooltip.formatter = function (item) {
    return element(item.name + '\n' + item.seriesName + ': ' + number(item.value) + ' ms');
  };
  option.series = picture.parts.map(function (part, at) {
    return {type: 'bar', stack: 'step', name: part[1], color: PART[part[0]], barMaxWidth: 26,
      itemStyle: {decal: decalOf(part[0])},
      data: picture.rows.map(function (row) { return row[at + 1]; })};
  });
  return option;
}

/* -- all ranks over time --------------------------------------------------------------------- */

var DOING = {
  starting: {fill: 'grey'}, running: {fill: '#0072b2', opacity: 0.45}, training: {fill: '#0072b2', opacity: 0.28},
  evaluating: {fill: '#7a6fb0'}, regrouping: {fill: '#8c6d00'}, frozen: {fill: '#444c56'}, gone: {fill: 'none'}
};
function styleOf(doing, look) {
  var kind = DOING[doing] || DOING.starting;
  if (doing === 'starting') return {fill: look.dark ? '#3a424c' : '#dfe4ea'};
  if (doing === 'gone') {
    return {fill: look.dark ? '#2a1518' : '#fff1f0', stroke: '#d00000', lineWidth: 1, lineDash: [4, 3],
      decal: hatch(look.dark ? 'rgba(255,138,128,.55)' : 'rgba(208,0,0,.35)', Math.PI / 4, 6)};
  }
  if (doing === 'frozen') return {fill: kind.fill, decal: hatch('rgba(255,255,255,.5)', 0, 4)};
  if (doing === 'regrouping') return {fill: kind.fill, decal: hatch('rgba(255,255,255,.4)')};
  return {fill: kind.fill, opacity: kind.opacity && (look.dark ? kind.opacity + 0.2 : kind.opacity) || 1};
}

function placed(moments, seconds, room) {
  var free = [], levels = 1;
  var found = moments.map(function (one, at) {
    var x = one[0] / seconds * room, level = 0;
    while (level < 4 && free[level] !== undefined && x - free[level] < 19) level++;
    if (level === 4) level = 3;
    free[level] = x;
    levels = Math.max(levels, level + 1);
    return [one[0], level, at];
  });
  return {levels: moments.length ? levels : 0, of: found};
}

function timeline(picture, look, width, place) {
  var option = base(look, picture), rows = picture.rows, narrow = width < 560;
  var longest = Math.max.apply(null, rows.map(function (row) { return row.label.length; }));
  var left = Math.min(narrow ? 92 : 190, 16 + 7.2 * longest), right = 22;
  var levels = placed(picture.moments, picture.seconds, width - left - right);
  var top = 8 + 20 * levels.levels, each = rows.length > 32 ? 18 : rows.length > 12 ? 24 : 34;
  var height = top + each * rows.length + 44;
  place.style.height = height + 'px';
  option.grid = {left: left, right: right, top: top, bottom: 44};
  option.xAxis = axis(look, {type: 'value', min: 0, max: picture.seconds, name: 'time since the run began',
    nameLocation: 'middle', nameGap: 26,
    axisLabel: {color: look.soft, hideOverlap: true, formatter: function (at) { return axisTime(at, picture.seconds); }}});
  option.yAxis = axis(look, {type: 'category', inverse: true, data: rows.map(function (row) { return row.label; }),
    axisTick: {show: false}, splitLine: {show: false},
    axisLabel: {color: look.ink, width: left - 12, overflow: 'break', fontSize: narrow ? 11 : 12, interval: 0}});
  option.dataZoom = [{type: 'inside', xAxisIndex: 0, zoomOnMouseWheel: 'ctrl', filterMode: 'none'}];

  function rectangle(params, api, row, begin, end, from, to) {
    var a = api.coord([begin, row]), b = api.coord([end, row]), size = api.size([0, 1])[1] * 0.82;
    var x = Math.max(a[0], params.coordSys.x), till = Math.min(b[0], params.coordSys.x + params.coordSys.width);
    if (till <= x && !(till === x)) return null;
    return {x: x, y: a[1] + size * (0.5 - to), width: Math.max(till - x, 0.6), height: Math.max(size * (to - from), 0.5)};
  }
  var spans = [], cells = [], slow = [], marks = [];
  rows.forEach(function (row, at) {
    row.spans.forEach(function (one) { spans.push({value: [at, one[0], one[1]], doing: one[2]}); });
    row.cells.forEach(function (one) { cells.push({value: [at, one[0], one[1]], parts: one.slice(2)}); });
    row.slow.forEach(function (one) { slow.push({value: [at, one[0], one[1]], text: one[2]}); });
    var saved = -Infinity, room = 11 * picture.seconds / (width - left - right);
    row.marks.forEach(function (one) {
      if (one[1] === 'checkpoint') {  /* of many that would lie over each other, those that do not */
        if (one[0] - saved < room) return;
        saved = one[0];
      }
      marks.push({value: [at, one[0], one[0]], what: one[1]});
    });
  });
  function custom(name, data, draw, z) {
    return {type: 'custom', name: name, data: data, z: z, encode: {x: [1, 2], y: 0}, clip: true,
      progressive: 0, renderItem: function (params, api) { return draw(params, api, data[params.dataIndex]); }};
  }
  option.series = [
    custom('doing', spans, function (params, api, one) {
      var shape = rectangle(params, api, one.value[0], one.value[1], one.value[2], 0, 1);
      if (!shape) return null;
      var children = [{type: 'rect', shape: shape, style: styleOf(one.doing, look)}];
      if (one.doing === 'gone') {
        var text = 'not there ' + lasting(one.value[2] - one.value[1]);
        if (shape.width > 7 * text.length && shape.height > 12) {
          children.push({type: 'text', style: {x: shape.x + shape.width / 2, y: shape.y + shape.height / 2, text: text,
            fill: look.dark ? '#ffb4ab' : '#8c0000', align: 'center', verticalAlign: 'middle', fontWeight: 'bold',
            fontSize: 11, backgroundColor: look.paper, padding: [1, 4], borderRadius: 3}});
        }
      }
      return {type: 'group', children: children};
    }, 1),
    custom('steps', cells, function (params, api, one) {
      var at = 0, children = [];
      ['computing', 'moving', 'other', 'saving', 'data', 'waiting'].forEach(function (part) {
        var index = picture.parts.findIndex(function (known) { return known[0] === part; });
        var share = one.parts[index];
        if (share > 0.008) {
          var shape = rectangle(params, api, one.value[0], one.value[1], one.value[2], at, at + share);
          if (shape) children.push({type: 'rect', shape: shape,
            style: {fill: PART[part], decal: decalOf(part)}});
        }
        at += share;
      });
      return {type: 'group', children: children};
    }, 2),
    custom('slow', slow, function (params, api, one) {
      var shape = rectangle(params, api, one.value[0], one.value[1], one.value[2], -0.08, 1.08);
      if (!shape) return null;
      var children = [{type: 'rect', shape: shape, style: {fill: 'none', stroke: look.dark ? '#ffffff' : '#000000', lineWidth: 2.5}}];
      var text = shape.width > 170 ? 'slow: slows the others down' : 'slow';
      if (shape.width > 36) {
        children.push({type: 'text', style: {x: shape.x + shape.width / 2, y: shape.y + shape.height / 2, text: text, align: 'center',
          verticalAlign: 'middle', fill: look.dark ? '#000000' : '#ffffff', backgroundColor: look.dark ? '#ffffff' : '#000000',
          padding: [2, 5], borderRadius: 3, fontSize: 11, fontWeight: 'bold'}});
      }
      return {type: 'group', children: children};
    }, 4),
    custom('marks', marks, function (params, api, one) {
      var at = api.coord([one.value[1], one.value[0]]), size = api.size([0, 1])[1] * 0.41, colour = MARK[one.what][0];
      if (at[0] < params.coordSys.x - 1 || at[0] > params.coordSys.x + params.coordSys.width + 1) return null;
      var x = at[0], y = at[1], halo = {stroke: look.paper, lineWidth: 5}, line = {stroke: colour, lineWidth: 3};
      if (one.what === 'checkpoint') {
        return {type: 'polygon', shape: {points: [[x - 4, y + size + 3], [x + 4, y + size + 3], [x, y + size - 5]]},
          style: {fill: look.dark ? '#4cc38a' : '#00563f', stroke: look.paper, lineWidth: 1}};
      }
      if (one.what === 'back') {
        return {type: 'polygon', shape: {points: [[x - 2, y - 7], [x - 2, y + 7], [x + 9, y]]},
          style: {fill: look.dark ? '#4cc38a' : colour, stroke: look.paper, lineWidth: 1.5}};
      }
      var legs = [[x - 6, y - 6, x + 6, y + 6], [x - 6, y + 6, x + 6, y - 6]];
      return {type: 'group', children: [halo, line].reduce(function (all, style) {
        return all.concat(legs.map(function (leg) {
          return {type: 'line', shape: {x1: leg[0], y1: leg[1], x2: leg[2], y2: leg[3]}, style: style};
        }));
      }, [])};
    }, 5),
    custom('moments', levels.of.map(function (one) {
      return {value: [0, one[0], one[0]], level: one[1], at: one[2]};
    }), function (params, api, one) {
      var x = api.coord([one.value[1], 0])[0], area = params.coordSys, y = area.y - 14 - 20 * one.level;
      if (x < area.x - 1 || x > area.x + area.width + 1) return null;
      var colour = MOOD[picture.moments[one.at][2]];
      return {type: 'group', children: [
        {type: 'line', shape: {x1: x, y1: y, x2: x, y2: area.y + area.height}, style: {stroke: look.dark ? '#c9d1d9' : colour,
          lineWidth: 1, lineDash: [3, 3], opacity: 0.8}},
        {type: 'circle', shape: {cx: x, cy: y, r: 9}, style: {fill: colour, stroke: look.paper, lineWidth: 1}},
        {type: 'text', style: {x: x, y: y, text: String(one.at + 1), fill: '#ffffff', align: 'center', verticalAlign: 'middle',
          fontSize: 11, fontWeight: 'bold'}}
      ]};
    }, 6)
  ];
  option.series[4].clip = false;
  option.tooltip.trigger = 'item';
  option.tooltip.formatter = function (item) { return element(told(picture, item.seriesName, item.data)); };
  return option;
}

function told(picture, name, one) {
  var row = picture.rows[one.value[0]].label, when = 'from ' + lasting(one.value[1]) + ' to ' + lasting(one.value[2]);
  if (name === 'doing') return row + '\n' + picture.doing[one.doing] + '\n' + when;
  if (name === 'slow') return one.text + '\n' + when;
  if (name === 'marks') return row + ': ' + MARK[one.what][1] + ' after ' + lasting(one.value[1]);
  if (name === 'moments') {
    var moment = picture.moments[one.at];
    return (one.at + 1) + '. after ' + lasting(moment[0]) + ': ' + moment[1];
  }
  return row + ', ' + when + '\n' + picture.parts.map(function (part, at) {
    return part[1] + ': ' + Math.round(100 * one.parts[at]) + ' %';
  }).join('\n');
}

/* -- hosts and links ------------------------------------------------------------------------- */

function map(picture, look, width, place) {
  var option = base(look, picture), count = picture.hosts.length, narrow = width < 560, by = {};
  var tall = {2: 110, 3: 230, 4: 300}[count] || 400, box = [narrow ? 84 : 128, 42];
  place.style.height = tall + 'px';
  picture.rates.forEach(function (one) {
    var key = Math.min(one[0], one[1]) + ' ' + Math.max(one[0], one[1]);
    (by[key] = by[key] || []).push(one);
  });
  /* everything in pixels: a circle of hosts, as wide as the page lets it be and no wider than looks well */
  var wide = Math.min((width - box[0]) / 2 - 6, 330), lowest = Math.cos(Math.PI * (1 - count % 2 / count));
  function at(host) {
    var angle = (count === 2 ? -Math.PI / 2 : 0) + 2 * Math.PI * host / count;
    return [width / 2 + wide * Math.sin(angle), count === 2 ? tall / 2 :
      box[1] / 2 + 6 + (1 - Math.cos(angle)) / (1 - lowest) * (tall - box[1] - 12)];
  }
  var pairs = Object.keys(by).map(function (key, index) {
    var pair = by[key], worst = pair.reduce(function (a, b) { return a[2] < b[2] ? a : b; });
    var best = pair.reduce(function (a, b) { return a[2] > b[2] ? a : b; });
    var slow = worst[2] < picture.middle / 2, ends = key.split(' ').map(function (host) { return at(+host); });
    return {value: index, slow: slow, ends: ends, along: pairAlong(key, count, narrow),
      text: best[2] - worst[2] < 0.15 * worst[2] ? worst[3] : pair.map(function (one) {
        return cut(picture.hosts[one[0]][0], 12) + ' → ' + cut(picture.hosts[one[1]][0], 12) + ' ' + one[3];
      }).join('\n'),
      about: pair.map(function (one) {
        return picture.hosts[one[0]][0] + ' → ' + picture.hosts[one[1]][0] + ': ' + one[3];
      }).join('\n')};
  });
  pairs.sort(function (a, b) { return a.slow - b.slow; });
  option.grid = {left: 0, right: 0, top: 0, bottom: 0};
  option.xAxis = {type: 'value', min: 0, max: width, show: false};
  option.yAxis = {type: 'value', min: 0, max: tall, show: false, inverse: true};
  option.tooltip.trigger = 'item';
  option.tooltip.formatter = function (item) { return element(item.data.about); };
  function custom(data, draw, z) {
    return {type: 'custom', data: data, z: z, encode: {x: 0, y: 0}, renderItem: function (params) { return draw(data[params.dataIndex]); }};
  }
  function words(text, x, y, more) {
    var style = {x: x, y: y, text: text, align: 'center', verticalAlign: 'middle', fontSize: 12, lineHeight: 15};
    for (var name in more) style[name] = more[name];
    return {type: 'text', style: style};
  }
  option.series = [
    custom(pairs, function (one) {
      return {type: 'line', shape: {x1: one.ends[0][0], y1: one.ends[0][1], x2: one.ends[1][0], y2: one.ends[1][1]},
        style: {stroke: one.slow ? '#d55e00' : look.soft, lineWidth: one.slow ? 4 : 2, lineDash: one.slow ? [8, 5] : null}};
    }, 1),
    custom(pairs.filter(function (one) { return count <= (narrow ? 3 : 5) || one.slow; }), function (one) {
      var x = one.ends[0][0] + one.along * (one.ends[1][0] - one.ends[0][0]);
      var y = one.ends[0][1] + one.along * (one.ends[1][1] - one.ends[0][1]);
      return words((one.slow ? 'slow: ' : '') + one.text, Math.max(70, Math.min(width - 70, x)), y, {fill: look.ink,
        backgroundColor: look.paper, padding: [2, 4], fontWeight: one.slow ? 'bold' : 'normal', fontSize: narrow ? 11 : 12});
    }, 2),
    custom(picture.hosts.map(function (host, index) {
      return {value: index, about: host.filter(Boolean).join('\n')};
    }), function (one) {
      var host = picture.hosts[one.value], where = at(one.value);
      return {type: 'group', children: [
        {type: 'rect', shape: {x: where[0] - box[0] / 2, y: where[1] - box[1] / 2, width: box[0], height: box[1], r: 6},
          style: {fill: '#0b5c8f', stroke: look.ink, lineWidth: 1}},
        words(host.filter(Boolean).join('\n'), where[0], where[1], {fill: '#ffffff', width: box[0] - 8, overflow: 'truncate'})]};
    }, 3)
  ];
  return option;
}
/* Where on its line a label stands: lines that cross in the middle have theirs beside it. */
function pairAlong(key, count, narrow) {
  var ends = key.split(' '), apart = Math.abs(ends[0] - ends[1]);
  if (narrow && count === 3) return {'0 1': 0.38, '0 2': 0.64}[key] || 0.5;
  return count > 3 && apart > 1 && apart < count - 1 ? (ends[0] % 2 ? 0.3 : 0.36) : 0.5;
}

function matrix(picture, look) {
  var option = base(look, picture), names = picture.hosts.map(function (host) { return host[0]; });
  var rates = picture.rates.map(function (one) { return one[2] / 1e6; });
  option.grid = {left: 8, right: 16, top: 10, bottom: 60, containLabel: true};
  option.xAxis = axis(look, {type: 'category', data: names, name: 'to', axisLabel: {color: look.soft, rotate: 60, fontSize: 10}});
  option.yAxis = axis(look, {type: 'category', data: names, inverse: true, name: 'from', axisLabel: {color: look.soft, fontSize: 10}});
  option.visualMap = {min: 0, max: Math.max.apply(null, rates), calculable: false, orient: 'horizontal', left: 'center',
    bottom: 4, text: [number(Math.round(Math.max.apply(null, rates))) + ' Mbit/s', '0'], textStyle: {color: look.ink},
    inRange: {color: ['#fff4d6', '#e69f00', '#0072b2', '#00304d']}};
  option.tooltip.formatter = function (item) {
    var one = picture.rates[item.dataIndex];
    return element(names[one[0]] + ' → ' + names[one[1]] + ': ' + one[3]);
  };
  option.series = [{type: 'heatmap', label: {show: names.length <= 12, fontSize: 9, formatter: function (item) {
    return String(Math.round(item.value[2]));
  }}, data: picture.rates.map(function (one) { return [one[1], one[0], one[2] / 1e6]; }),
    itemStyle: {borderColor: look.paper, borderWidth: 1, decal: {symbol: 'none'}}}];
  return option;
}

/* -- what was forecast, beside what came ------------------------------------------------------ */

function forecast(picture, look) {
  var option = base(look, picture);
  option.grid = {left: 12, right: 24, top: 12, bottom: 34, containLabel: true};
  var most = 1.2 * Math.max(picture.high, picture.came);
  option.xAxis = axis(look, {type: 'value', name: 'ms of a step', nameLocation: 'middle', nameGap: 24, min: 0, max: most,
    axisLabel: {color: look.soft, hideOverlap: true, showMaxLabel: false, formatter: number}});
  option.yAxis = axis(look, {type: 'category', inverse: true, data: ['forecast', 'came'], axisLabel: {color: look.ink}});
  var data = [{value: [0, picture.said]}, {value: [1, picture.came]}];
  option.tooltip.formatter = function (item) { return element(number(item.value[1]) + ' ms'); };
  option.series = [{type: 'custom', data: data, encode: {x: 1, y: 0}, renderItem: function (params, api) {
    var row = api.value(0), at = api.coord([api.value(1), row]), children = [];
    if (row === 0) {
      var low = api.coord([picture.low, 0]), high = api.coord([picture.high, 0]);
      children = [[low[0], at[1], high[0], at[1]], [low[0], at[1] - 8, low[0], at[1] + 8], [high[0], at[1] - 8, high[0], at[1] + 8]]
        .map(function (leg) {
          return {type: 'line', shape: {x1: leg[0], y1: leg[1], x2: leg[2], y2: leg[3]}, style: {stroke: '#0072b2', lineWidth: 2.5}};
        });
    }
    children.push(row === 0 ? {type: 'circle', shape: {cx: at[0], cy: at[1], r: 6}, style: {fill: '#0072b2'}} :
      {type: 'polygon', shape: {points: [[at[0] - 8, at[1]], [at[0], at[1] - 8], [at[0] + 8, at[1]], [at[0], at[1] + 8]]},
        style: {fill: '#d55e00'}});
    children.push({type: 'text', style: {x: at[0], y: at[1] - 12, text: number(api.value(1)) + ' ms', align: 'center',
      verticalAlign: 'bottom', fill: look.ink, fontSize: 12}});
    return {type: 'group', children: children};
  }}];
  return option;
}

/* -- the legend of parts and states, as part of the page -------------------------------------- */

function svg(name, attributes, parent) {
  var found = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (var key in attributes) found.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(found);
  return found;
}
function swatch(draw) {
  var box = svg('svg', {viewBox: '0 0 24 12', 'aria-hidden': 'true'});
  draw(box);
  return box;
}
function lines(box, colour, angle) {
  for (var x = -12; x < 36; x += 6) {
    svg('line', angle === 0 ? {x1: 0, x2: 24, y1: x / 2 + 6, y2: x / 2 + 6, stroke: colour, 'stroke-width': 1.5} :
      {x1: x, y1: angle > 0 ? 0 : 12, x2: x + 12, y2: angle > 0 ? 12 : 0, stroke: colour, 'stroke-width': 2}, box);
  }
}
function boxed(fill, more) {
  return swatch(function (box) {
    svg('rect', {width: 24, height: 12, fill: fill}, box);
    if (more) more(box);
  });
}
function legend(picture, place, look) {
  var old = place.parentNode.querySelector('.legend');
  if (old) old.remove();
  var list = document.createElement('ul');
  list.className = 'legend';
  function entry(sample, text) {
    var item = document.createElement('li');
    item.appendChild(sample);
    item.appendChild(document.createTextNode(text));
    list.appendChild(item);
  }
  picture.parts.forEach(function (part) {
    var index = picture.parts.indexOf(part), seen = picture.rows.some(function (row) {
      if (picture.kind === 'division') return row[1 + index] > 0.002 * row.slice(1).reduce(function (a, b) { return a + b; });
      return row.cells.some(function (cell) { return cell[2 + index] > 0.008; });
    });
    if (seen) entry(boxed(PART[part[0]], part[0] === 'waiting' ? function (box) { lines(box, 'rgba(0,0,0,.45)', -1); } :
      part[0] === 'data' ? function (box) { lines(box, 'rgba(0,0,0,.35)', 1); } :
      part[0] === 'saving' ? function (box) { lines(box, 'rgba(255,255,255,.5)', 0); } : null), part[1]);
  });
  if (picture.kind === 'timeline') {
    var doing = {}, marks = {}, slow = false;
    picture.rows.forEach(function (row) {
      row.spans.forEach(function (one) {  /* what can be seen, and is not covered */
        var wide = one[1] - one[0], open = wide - row.cells.reduce(function (sum, cell) {
          return sum + Math.max(0, Math.min(cell[1], one[1]) - Math.max(cell[0], one[0]));
        }, 0);
        if (Math.max(open, one[2] === 'gone' ? wide : 0) > 0.004 * picture.seconds) doing[one[2]] = true;
      });
      row.marks.forEach(function (one) { marks[one[1]] = true; });
      slow = slow || row.slow.length > 0;
    });
    Object.keys(picture.doing).forEach(function (name) {
      if (!doing[name]) return;
      var style = styleOf(name, look);
      entry(boxed(style.fill, function (box) {
        if (style.stroke) svg('rect', {x: 0.5, y: 0.5, width: 23, height: 11, fill: 'none', stroke: style.stroke, 'stroke-dasharray': '4 3'}, box);
        if (style.decal) lines(box, style.decal.color, name === 'gone' ? 1 : name === 'frozen' ? 0 : -1);
        if (style.opacity) box.firstChild.setAttribute('opacity', style.opacity);
      }), picture.doing[name]);
    });
    if (slow) entry(swatch(function (box) {
      svg('rect', {x: 1, y: 1, width: 22, height: 10, fill: 'none', stroke: look.ink, 'stroke-width': 2}, box);
    }), 'slow: it slows the others down');
    if (marks.checkpoint) entry(swatch(function (box) {
      svg('path', {d: 'M8 11 L16 11 L12 1 Z', fill: look.dark ? '#4cc38a' : '#00563f'}, box);
    }), 'checkpoint written');
    if (marks.lost || marks.failed) entry(swatch(function (box) {
      svg('path', {d: 'M7 1 L17 11 M7 11 L17 1', stroke: '#d00000', 'stroke-width': 3, fill: 'none'}, box);
    }), 'lost or failed');
    if (marks.back) entry(swatch(function (box) {
      svg('path', {d: 'M8 0 L8 12 L18 6 Z', fill: look.dark ? '#4cc38a' : '#0b7a3b'}, box);
    }), 'started again');
    if (picture.moments.length) entry(swatch(function (box) {
      svg('circle', {cx: 12, cy: 6, r: 6, fill: MOOD.note}, box);
    }), 'numbers: the sentences below');
  }
  place.parentNode.insertBefore(list, place);
}

/* -- drawing ------------------------------------------------------------------------------------ */

var KINDS = {curves: curves, division: division, timeline: timeline, map: map, matrix: matrix, forecast: forecast};

function draw() {
  drawn.forEach(function (chart) { chart.dispose(); });
  drawn = pictures.map(function (picture, at) {
    var place = document.getElementById('p' + at), look = theme();
    var width = printing ? 690 : place.clientWidth;
    var option = KINDS[picture.kind](picture, look, width, place);
    if (picture.kind === 'timeline' || picture.kind === 'division') legend(picture, place, look);
    var chart = echarts.init(place, null, {renderer: 'svg', width: width, height: place.clientHeight || parseInt(place.style.height, 10)});
    option.aria.label.description = picture.title + '. ' + document.getElementById('says' + at).textContent;
    chart.setOption(option);
    return chart;
  });
  document.documentElement.setAttribute('data-drawn', drawn.length);
}

/* Keys: arrows go from value to value, or from moment to moment; + and - make it wider. */
function readout(picture, chart, at, step) {
  var text = '';
  if (picture.kind === 'timeline') {
    var count = picture.moments.length;
    if (!count) return null;
    at = (at + step + count) % count;
    chart.dispatchAction({type: 'showTip', seriesIndex: 4, dataIndex: at});
    text = told(picture, 'moments', {value: [0, picture.moments[at][0], picture.moments[at][0]], at: at});
  } else if (picture.kind === 'curves') {
    var first = picture.series[0].points;
    at = Math.max(0, Math.min(first.length - 1, at + step * Math.max(1, Math.round(first.length / 60))));
    chart.dispatchAction({type: 'showTip', seriesIndex: 0, dataIndex: at});
    text = (picture.over === 'step' ? 'step ' : 'after ') + number(first[at][0]) + ': ' + picture.series.map(function (one) {
      var near = one.points.reduce(function (a, b) {
        return Math.abs(b[0] - first[at][0]) < Math.abs(a[0] - first[at][0]) ? b : a;
      });
      return one.name + ' ' + number(near[1]);
    }).join(', ');
  } else if (picture.kind === 'division') {
    at = (at + step + picture.rows.length) % picture.rows.length;
    text = picture.rows[at][0] + ': ' + picture.parts.map(function (part, index) {
      return part[1] + ' ' + number(picture.rows[at][index + 1]) + ' ms';
    }).join(', ');
  } else if (picture.kind === 'map' || picture.kind === 'matrix') {
    at = (at + step + picture.rates.length) % picture.rates.length;
    var one = picture.rates[at];
    text = picture.hosts[one[0]][0] + ' → ' + picture.hosts[one[1]][0] + ': ' + one[3];
  } else {
    at = (at + step + 2) % 2;
    text = at ? 'came: ' + number(picture.came) + ' ms' : 'forecast: ' + number(picture.said) + ' ms, from ' +
      number(picture.low) + ' to ' + number(picture.high) + ' ms';
  }
  return {at: at, text: text};
}

pictures.forEach(function (picture, index) {
  var place = document.getElementById('p' + index), at = -1, from = 0, to = 100;
  place.addEventListener('keydown', function (event) {
    var step = {ArrowRight: 1, ArrowLeft: -1}[event.key], wider = {'+': 0.5, '-': 2}[event.key];
    if (step) {
      var found = readout(picture, drawn[index], at, step);
      if (found) {
        at = found.at;
        document.getElementById('r' + index).textContent = found.text;
        event.preventDefault();
      }
    } else if (wider && (picture.kind === 'timeline' || picture.kind === 'curves')) {
      var middle = (from + to) / 2, half = Math.min(50, (to - from) / 2 * wider);
      from = Math.max(0, middle - half);
      to = Math.min(100, from + 2 * half);
      drawn[index].dispatchAction({type: 'dataZoom', start: from, end: to});
      event.preventDefault();
    } else if (event.key === 'Escape') {
      drawn[index].dispatchAction({type: 'hideTip'});
    }
  });
  if (picture.kind === 'timeline' || picture.kind === 'curves') {
    place.addEventListener('focus', function () {
      document.getElementById('r' + index).textContent = 'Arrow keys: go through it. + and −: more or less of it. Ctrl and wheel do so, too.';
    });
  }
});

var waiting = 0;
addEventListener('resize', function () {
  clearTimeout(waiting);
  waiting = setTimeout(draw, 150);
});
darkness.addEventListener('change', draw);
addEventListener('beforeprint', function () { printing = true; draw(); });
addEventListener('afterprint', function () { printing = false; draw(); });
draw();
})();
