// A client in Node with its fetch alone. `client.mjs URL` makes the calls that test_programs.py lists, and prints a JSON
// report.

import { Buffer } from 'node:buffer'
import diagnostics from 'node:diagnostics_channel'
import process from 'node:process'

const LENGTH_HEADER = 'Inference-Header-Content-Length'
const CONCURRENT = 50
const LARGE = 2_000_000

let opened = 0
diagnostics.subscribe('undici:client:connected', () => { opened++ })

// The status, the JSON and the bytes after it of the answer to a request with a JSON head and bytes after it.
async function infer (model, head, raw) {
  const json = Buffer.from(JSON.stringify(head))
  const response = await fetch(`${process.argv[2]}/v2/models/${model}/infer`, {
    method: 'POST',
    headers: raw ? { [LENGTH_HEADER]: String(json.length) } : {},
    body: raw ? Buffer.concat([json, raw]) : json,
  })
  const answer = Buffer.from(await response.arrayBuffer())
  const end = Number(response.headers.get(LENGTH_HEADER) ?? answer.length)
  return { status: response.status, fields: JSON.parse(answer.subarray(0, end)), rest: answer.subarray(end) }
}

const input = (values, more) => ({ name: 'x', datatype: 'FP32', shape: [1, values.length], ...more })

async function asBinary (values) {
  const raw = Buffer.from(Float32Array.from(values).buffer)
  const { rest } = await infer('echo-FP32', {
    inputs: [input(values, { parameters: { binary_data_size: raw.length } })],
    parameters: { binary_data_output: true },
  }, raw)
  return Array.from({ length: rest.length / 4 }, (_, place) => rest.readFloatLE(4 * place))
}

async function asJson (values) {
  const { fields } = await infer('echo-FP32', { inputs: [input(values, { data: values })] })
  return fields.outputs[0].data
}

const few = [1.5, -2]
const large = Array.from({ length: LARGE }, (_, place) => place)
const report = { binary: await asBinary(few), json: await asJson(few) }
const got = await asBinary(large)
report.large = got.length === LARGE && got.every((value, place) => value === place)
// Long answers of JSON come compressed, because fetch asks for it.
report.long = (await asJson(Array(3000).fill(0))).length
const { status, fields } = await infer('nobody', { inputs: [] })
report.error = [status, fields.error]
report.connections = opened
const tags = Array.from({ length: CONCURRENT }, (_, tag) => tag)
report.concurrent = (await Promise.all(tags.map((tag) => asBinary([tag])))).flat()
process.stdout.write(JSON.stringify(report))
