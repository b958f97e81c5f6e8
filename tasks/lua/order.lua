-- order: who is next. Class first (strict); inside a class the tenant that was served least; then its own arrival order.
--
-- Service is a virtual token counter (VTC, Sheng et al., arXiv 2401.00588): a tenant is charged its input when a request
-- of its is claimed and its output, twice, as it is generated, divided by its weight. The least charged goes first, so
-- two tenants that both wait get equal tokens, whatever the sizes of their requests: the gap stays below twice the
-- larger of the longest input and twice the longest output. Who was idle gets no credit for it: on joining a line a
-- tenant is lifted to the least charged one there, or, if nobody waits, to the one that left last.
--
-- Strict classes starve. So one claim in OVERDUE_EVERY goes to the request that is overdue longest, of any class; under
-- overload that is a rate, not a bound on its wait.

local OUTPUT_COST = 2

local function member(id, row)
  return row.class .. '|' .. row.tenant .. '|' .. string.format('%015d', row.arrival) .. '|' .. id
end

local function head(class_tenant)
  local first = '[' .. class_tenant .. '|'
  return call('ZRANGEBYLEX', WAITING, first, first .. '\255', 'LIMIT', 0, 1)[1]
end

local function service_of(tenant) return tonumber(call('HGET', SERVICE, tenant) or '0') end

local function serve(tenant, tokens) -- charge a tenant; its place in every line it stands in moves with it
  if tokens <= 0 then return end
  local service = call('HINCRBY', SERVICE, tenant, math.ceil(tokens))
  for class = 0, 3 do call('ZADD', TENANTS, 'XX', class * CLASS_STRIDE + service, class .. '|' .. tenant) end
end

-- A tenant joins the line of a class in which it had nothing waiting.
local function lift(tenant, class)
  local first = call('ZRANGEBYSCORE', TENANTS, class * CLASS_STRIDE, (class + 1) * CLASS_STRIDE - 1,
    'WITHSCORES', 'LIMIT', 0, 1)
  local floor = first[2] and tonumber(first[2]) - class * CLASS_STRIDE or counter('served_last')
  serve(tenant, floor - service_of(tenant))
  call('ZADD', TENANTS, class * CLASS_STRIDE + service_of(tenant), class .. '|' .. tenant)
end

local function join(id, row) -- into the line
  row.state = 'waiting'
  local class_tenant = row.class .. '|' .. row.tenant
  if not call('ZSCORE', TENANTS, class_tenant) then lift(row.tenant, row.class) end
  call('ZADD', WAITING, 0, member(id, row))
  call('ZADD', DUE, row.due_ms, id)
  if row.deadline_ms > 0 then call('ZADD', DEADLINES, row.deadline_ms, id) end
  count('waiting' .. row.class, 1)
  count('waiting_tokens', row.input)
  wake()
end

local function leave(id, row) -- out of the line
  call('ZREM', WAITING, member(id, row))
  local class_tenant = row.class .. '|' .. row.tenant
  if not head(class_tenant) then
    call('ZREM', TENANTS, class_tenant)
    call('HSET', COUNTERS, 'served_last', service_of(row.tenant))
  end
  call('ZREM', DUE, id)
  call('ZREM', DEADLINES, id)
  count('waiting' .. row.class, -1)
  count('waiting_tokens', 0 - row.input) -- not `-row.input`: HINCRBY refuses Lua's "-0"
end

local function next_id()
  local class_tenant = call('ZRANGE', TENANTS, 0, 0)[1]
  if not class_tenant then return end
  if call('HINCRBY', COUNTERS, 'claims', 1) % OVERDUE_EVERY == 0 then
    local overdue = call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, 1)[1]
    if overdue then return overdue end
  end
  return string.match(head(class_tenant), '([^|]*)$')
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
