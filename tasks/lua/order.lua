-- order: who is next. Class first (strict); inside a class the tenant that was served least; then its own arrival
-- order, of whose first few one that prefers the claiming worker goes first.
--
-- Service is a virtual token counter (VTC, Sheng et al., arXiv 2401.00588): a tenant is charged its input when a
-- request of its is claimed and its output, twice, as it is generated, divided by its weight. The least charged goes
-- first, so two tenants that both wait get equal tokens, whatever the sizes of their requests: the gap stays below
-- twice the larger of the longest input and twice the longest output. Who was idle gets no credit for it: on joining a
-- line a tenant is lifted to the least charged one there, or, if nobody waits, to the one that left last.
--
-- Strict classes starve. So one claim in OVERDUE_EVERY goes to the request that is overdue longest, of any class; under
-- overload that is a rate, not a bound on its wait.
--
-- Of a class that is shed nothing goes (endings.lua `sweep`). What is left in its lines is background work.

local OUTPUT_COST = 2
local LINES_MAX = 16 -- tenants that one search looks at, and as many again if none of them has what fits
local TRIES_MAX = 4  -- rows of one tenant that it reads
local SHED_LOOK, SHED_MS = 64, 30000 -- what is overdue and shed: so many are put off by so long at each look
local CROWD_RATIO, CROWD_SLACK = 1.5, 4 -- a worker is crowded that runs so many times the mean, and so many more

local function member(id, row)
  return table.concat({ row.class, row.tenant, string.format('%015d', row.arrival), row.preferred, id }, '|')
end

local function members(class_tenant, limit)
  local first = '[' .. class_tenant .. '|'
  return call('ZRANGEBYLEX', WAITING, first, first .. '\255', 'LIMIT', 0, limit)
end

local function head(class_tenant) return members(class_tenant, 1)[1] end

local function id_of(entry) return string.match(entry, '.*|(.*)$') end

local function service_of(tenant) return tonumber(call('HGET', SERVICE, tenant) or '0') end

local function serve(tenant, tokens) -- charge a tenant; its place in every line it stands in moves with it
  if tokens <= 0 then return end
  local service = call('HINCRBY', SERVICE, tenant, math.ceil(tokens))
  call('ZADD', TENANTS, 'XX', service, '0|' .. tenant, CLASS_STRIDE + service, '1|' .. tenant,
    2 * CLASS_STRIDE + service, '2|' .. tenant, 3 * CLASS_STRIDE + service, '3|' .. tenant)
end

-- A tenant joins the line of a class in which it had nothing waiting.
local function lift(tenant, class)
  local first = call('ZRANGEBYSCORE', TENANTS, class * CLASS_STRIDE, (class + 1) * CLASS_STRIDE - 1,
    'WITHSCORES', 'LIMIT', 0, 1)
  -- One less than the least: among equals who comes now goes first, and so waits for one slot at most.
  local floor = first[2] and tonumber(first[2]) - class * CLASS_STRIDE - 1 or counter('served_last')
  serve(tenant, floor - service_of(tenant))
  call('ZADD', TENANTS, class * CLASS_STRIDE + service_of(tenant), class .. '|' .. tenant)
end

local function measure(row, sign) -- depth by class and by tenant
  count('waiting' .. row.class, sign)
  count('waiting_tokens', sign * row.input)
  if row.preferred ~= '' then count('waiting_preferred', sign) end
  local added = depths[row.tenant] or { 0, 0 }
  depths[row.tenant] = { added[1] + sign, added[2] + sign * row.input }
end

local function join(id, row) -- into the line
  row.state = 'waiting'
  local class_tenant = row.class .. '|' .. row.tenant
  if not call('ZSCORE', TENANTS, class_tenant) then lift(row.tenant, row.class) end
  call('ZADD', WAITING, 0, member(id, row))
  call('ZADD', DUE, row.due_ms, id)
  if row.deadline_ms > 0 then call('ZADD', DEADLINES, row.deadline_ms, id) end
  measure(row, 1)
end

-- Out of the line. `others`: it is known that more of the same tenant and class wait.
local function leave(id, row, others)
  call('ZREM', WAITING, member(id, row))
  local class_tenant = row.class .. '|' .. row.tenant
  if not others and not head(class_tenant) then
    call('ZREM', TENANTS, class_tenant)
    note('served_last', service_of(row.tenant))
  end
  call('ZREM', DUE, id)
  if row.deadline_ms > 0 then call('ZREM', DEADLINES, id) end
  if row.held then
    call('ZREM', HELD, id)
    row.held = false
  end
  if row.saver ~= '' then
    call('HDEL', SAVING, row.saver)
    row.saver = ''
  end
  measure(row, -1)
end

-- What the claiming worker can start: room = {worker, slots, kv, context, prefill per class, idle, reserve, total_kv,
-- steal_ms, scan, below}. kv, context: -1 where unknown. `idle`: nothing is being prefilled.

local function fits(row, room)
  if room.context >= 0 and row.most > room.context then return false end
  if room.kv >= 0 and row.need > room.kv then return false end
  if not room.idle and row.input > room.prefill[row.class] then return false end
  -- What cannot be preempted must not fill the last slots, or nothing urgent could start.
  return row.rerunnable or row.class < 2 or room.slots > room.reserve
end

local function take_room(row, room)
  room.slots, room.idle = room.slots - 1, false
  if room.kv >= 0 then room.kv = math.max(0, room.kv - row.need) end
  for class = 0, 3 do room.prefill[class] = room.prefill[class] - row.input end
end

local function could_hold(row, room) -- were it alone
  return (room.total_kv < 0 or row.need <= room.total_kv) and (room.context < 0 or row.most <= room.context)
end

-- Larger than this worker. It ends when that was so of every worker there is, for TOO_LARGE_MS. (Who is full does not
-- look, and may yet hold it.)
local function refuse(id, row, room)
  local name = '|' .. room.worker .. '|'
  if not string.find(row.refused, name, 1, true) then
    row.refused, row.refused_ms = row.refused .. name, now
    keep(id, row)
  elseif row.saver == '' and now - row.refused_ms >= TOO_LARGE_MS then
    for _, worker in ipairs(call('ZRANGE', LEASES, 0, -1)) do
      if not string.find(row.refused, '|' .. worker .. '|', 1, true) then return end
    end
    room.too_large[id] = row
  end
end

-- It does not fit now. After SAVE_MS one worker that could hold it lets its engine run empty until it does.
local function pass_over(id, row, room)
  room.passed = math.min(room.passed, row.class)
  if row.passed_ms == 0 then
    row.passed_ms = now
    wake() -- another may have the room, and sleeps since the marker was taken
  elseif not could_hold(row, room) then
    return refuse(id, row, room)
  elseif room.total_kv >= 0 and now - row.passed_ms >= SAVE_MS and row.saver == ''
    and not call('HGET', SAVING, room.worker) then
    row.saver, row.refused = room.worker, ''
    call('HSET', SAVING, room.worker, id)
    room.below = math.min(room.below, row.class)
  elseif row.refused ~= '' and now - row.refused_ms > TOO_LARGE_MS / 2 then
    row.refused = '' -- written seldom: a busy worker passes it over many times a second
  else
    return
  end
  keep(id, row)
end

local function prefers(entry, worker)
  local preferred = string.match(entry, '.*|([^|]*)|')
  return preferred ~= '' and string.find(',' .. preferred .. ',', ',' .. worker .. ',', 1, true) ~= nil
end

-- Much more runs there than elsewhere: what it holds is better computed once more where there is less.
local function crowded(worker)
  local first = '[' .. worker .. '|'
  local mean = call('ZCARD', CLAIMS) / math.max(1, call('ZCARD', LEASES))
  return call('ZLEXCOUNT', CLAIMS, first, first .. '\255') > CROWD_RATIO * mean + CROWD_SLACK
end

-- Whether another than its preferred workers may have it. Else how long not yet, ms. Who has slots and is only busy
-- (ROOMS below 0) is waited for too: mostly that is over before its prefix were computed anew.
local function stealable(row, room)
  if row.preferred == '' then return true end
  local left_ms = row.entered_ms + math.min(room.steal_ms, row.steal_ms or room.steal_ms) - now
  if left_ms <= 0 then return true end
  for worker in string.gmatch(row.preferred, '[^,]+') do
    if worker == room.worker then return true end
    if tonumber(call('HGET', ROOMS, worker) or '0') ~= 0 and not crowded(worker) then return false, left_ms end
  end
  return true
end

-- Whether this worker can start it at once. What is passed over is remembered.
local function startable(id, row, room, mine)
  local free, left_ms = true, nil
  if not mine then free, left_ms = stealable(row, room) end
  if not free then room.hint_ms = math.min(room.hint_ms, left_ms)
  elseif fits(row, room) then return true
  else pass_over(id, row, room) end
end

-- Of one tenant's first few: one that prefers this worker, else the first that another worker may have.
-- Returns also whether others stay in its line.
local function next_of(class_tenant, room)
  local entries = members(class_tenant, room.scan)
  local tries, rest = 0, entries
  local function try(entry, mine)
    tries = tries + 1
    local id = id_of(entry)
    local row = row_of(id)
    if startable(id, row, room, mine) then return id, row, #entries > 1 end
  end
  if room.choosy then
    rest = {}
    for _, entry in ipairs(entries) do
      if tries >= TRIES_MAX or not prefers(entry, room.worker) then
        rest[#rest + 1] = entry
      else
        local id, row, others = try(entry, true)
        if id then return id, row, others end
      end
    end
  end
  for _, entry in ipairs(rest) do
    if tries >= TRIES_MAX then return end
    local id, row, others = try(entry, false)
    if id then return id, row, others end
  end
end

local function saved_for(room) -- the request that this worker saves KV cache for, if it fits by now
  local id = call('HGET', SAVING, room.worker)
  if not id then return end
  local row = row_of(id)
  if is_shed(row.class) then
    call('HDEL', SAVING, room.worker)
    row.saver = ''
    return keep(id, row)
  end
  if row.class >= room.below then return end
  if fits(row, room) then return id, row end
  room.passed = math.min(room.passed, row.class)
  -- Until then only what is more urgent; once it is overdue not even that, or it might never have the room.
  room.below = now > row.due_ms and math.min(1, row.class) or row.class
end

-- Who is overdue longest. What is shed is put off, or it would stand in the way of what is not.
local function longest_due()
  local some = stopped().shed == '' and 1 or SHED_LOOK
  for _, id in ipairs(call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, some)) do
    local row = row_of(id)
    if not is_shed(row.class) then return id, row end
    call('ZADD', DUE, now + SHED_MS, id)
  end
end

local function overdue(room)
  count('searches', 1)
  if counter('searches') % OVERDUE_EVERY ~= 0 then return end
  local id, row = longest_due()
  if not id then return end
  if row.class >= room.below then return end
  if fits(row, room) then return id, row end
  pass_over(id, row, room)
end

-- Tenants' lines, in order, without those of a class that is shed.
local function lines(first, last)
  if stopped().shed == '' then return call('ZRANGE', TENANTS, first, last) end
  local skip, wanted, found = first, last - first + 1, {}
  for class = 0, 3 do
    if not is_shed(class) and #found < wanted then
      local least, most = class * CLASS_STRIDE, (class + 1) * CLASS_STRIDE - 1
      for _, line in ipairs(call('ZRANGEBYSCORE', TENANTS, least, most, 'LIMIT', skip, wanted - #found)) do
        found[#found + 1] = line
      end
      skip = math.max(0, skip - call('ZCOUNT', TENANTS, least, most))
    end
  end
  return found
end

local function next_in(first, last, room) -- of these lines
  for _, class_tenant in ipairs(lines(first, last)) do
    if string.byte(class_tenant) - 48 >= room.below then return end
    local id, row, others = next_of(class_tenant, room)
    if id then return id, row, others end
  end
end

local function next_for(room)
  if room.slots <= 0 then return end
  local id, row = saved_for(room)
  if not id then id, row = overdue(room) end
  if id then return id, row end
  local others
  id, row, others = next_in(0, 0, room) -- it nearly always has it
  if not id then id, row, others = next_in(1, LINES_MAX - 1, room) end
  if id then return id, row, others end
  -- Nothing in front fits. Elsewhere each time, or so many large requests would hold up everybody behind them.
  local more = call('ZCARD', TENANTS) - LINES_MAX
  if more <= 0 then return end
  local from = LINES_MAX + counter('searches') * LINES_MAX % more
  return next_in(from, from + LINES_MAX - 1, room)
end

-- An estimate of how many go first: all of higher classes, and of its own class as many of every tenant as of its own.
local function place_of(id, row)
  local ahead = 0
  for class = 0, row.class - 1 do ahead = ahead + counter('waiting' .. class) end
  local own = '[' .. row.class .. '|' .. row.tenant .. '|'
  local rank = call('ZLEXCOUNT', WAITING, own, '[' .. member(id, row))
  local tenants = call('ZCOUNT', TENANTS, row.class * CLASS_STRIDE, (row.class + 1) * CLASS_STRIDE - 1)
  return ahead + math.min(counter('waiting' .. row.class), rank * tenants)
end
