// Conversion between the report's texts and a tensor's elements, raw and typed.

import { Buffer } from 'node:buffer'

// How Buffer reads and writes each datatype. FP16 and BF16 have no type in Node 20, so their 16 bits are written.
const NUMBERS = {
  INT8: ['Int8', 1, Number], INT16: ['Int16LE', 2, Number], INT32: ['Int32LE', 4, Number], INT64: ['BigInt64LE', 8, BigInt],
  UINT8: ['UInt8', 1, Number], UINT16: ['UInt16LE', 2, Number], UINT32: ['UInt32LE', 4, Number], UINT64: ['BigUInt64LE', 8, BigInt],
  FP16: ['UInt16LE', 2, Number], BF16: ['UInt16LE', 2, Number], FP32: ['FloatLE', 4, Number], FP64: ['DoubleLE', 8, Number],
}

// By datatype: its field of InferTensorContents, and the function that makes an element of a text.
const CONTENTS = {
  BOOL: ['bool_contents', (text) => text === 'true'],
  INT8: ['int_contents', Number], INT16: ['int_contents', Number], INT32: ['int_contents', Number],
  INT64: ['int64_contents', String], // the loader takes and gives 64 bits as strings
  UINT8: ['uint_contents', Number], UINT16: ['uint_contents', Number], UINT32: ['uint_contents', Number],
  UINT64: ['uint64_contents', String],
  FP32: ['fp32_contents', Number], FP64: ['fp64_contents', Number],
  BYTES: ['bytes_contents', (text) => Buffer.from(text)],
}

export const hasContents = (datatype) => datatype in CONTENTS

export function encode (datatype, texts) {
  if (datatype === 'BOOL') return Buffer.from(texts.map((text) => Number(text === 'true')))
  if (datatype === 'BYTES') {
    return Buffer.concat(texts.map((text) => {
      const element = Buffer.from(text)
      const length = Buffer.alloc(4)
      length.writeUInt32LE(element.length)
      return Buffer.concat([length, element])
    }))
  }
  const [method, width, parse] = NUMBERS[datatype]
  const encoded = Buffer.alloc(width * texts.length)
  texts.forEach((text, place) => encoded[`write${method}`](parse(text), place * width))
  return encoded
}

export function decode (datatype, encoded) {
  if (datatype === 'BOOL') return [...encoded].map((flag) => String(flag === 1))
  const texts = []
  if (datatype === 'BYTES') {
    for (let at = 0; at < encoded.length;) {
      const end = at + 4 + encoded.readUInt32LE(at)
      texts.push(encoded.toString('utf8', at + 4, end))
      at = end
    }
    return texts
  }
  const [method, width] = NUMBERS[datatype]
  for (let at = 0; at < encoded.length; at += width) texts.push(String(encoded[`read${method}`](at)))
  return texts
}

export function toContents (datatype, texts) {
  const [field, parse] = CONTENTS[datatype]
  return { [field]: texts.map(parse) }
}

export const fromContents = (datatype, contents) => contents[CONTENTS[datatype][0]].map(String)
