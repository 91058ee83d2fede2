package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strconv"

	pb "wire/inference"
)

// The datatypes with a type in Go. FP16 and BF16 have none, so their 16 bits are written.
type number interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64
}

func text(value any) string {
	return fmt.Sprint(value)
}

func packed[T number](values []T) []byte {
	encoded, err := binary.Append(nil, binary.LittleEndian, values)
	check(err)
	return encoded
}

func unpacked[T number](encoded []byte) []T {
	values := make([]T, len(encoded)/binary.Size(*new(T)))
	_, err := binary.Decode(encoded, binary.LittleEndian, values)
	check(err)
	return values
}

func parsed[T number](values []string) []T {
	numbers := make([]T, len(values))
	for place, value := range values {
		switch any(*new(T)).(type) {
		case float32, float64:
			parsed, err := strconv.ParseFloat(value, 64)
			check(err)
			numbers[place] = T(parsed)
		case uint8, uint16, uint32, uint64:
			parsed, err := strconv.ParseUint(value, 10, 64)
			check(err)
			numbers[place] = T(parsed)
		default:
			parsed, err := strconv.ParseInt(value, 10, 64)
			check(err)
			numbers[place] = T(parsed)
		}
	}
	return numbers
}

func printed[T any](values []T) []string {
	texts := make([]string, len(values))
	for place, value := range values {
		texts[place] = text(value)
	}
	return texts
}

type codec struct {
	encode func([]string) []byte
	decode func([]byte) []string
}

func numeric[T number]() codec {
	return codec{
		func(values []string) []byte { return packed(parsed[T](values)) },
		func(encoded []byte) []string { return printed(unpacked[T](encoded)) },
	}
}

var codecs = map[string]codec{
	"BOOL":  {encodeBools, decodeBools},
	"INT8":  numeric[int8](),
	"INT16": numeric[int16](),
	"INT32": numeric[int32](),
	"INT64": numeric[int64](),
	"UINT8": numeric[uint8](), "UINT16": numeric[uint16](), "UINT32": numeric[uint32](), "UINT64": numeric[uint64](),
	"FP16": numeric[uint16](), "BF16": numeric[uint16](), "FP32": numeric[float32](), "FP64": numeric[float64](),
	"BYTES": {encodeStrings, decodeStrings},
}

func encode(datatype string, values []string) []byte  { return codecs[datatype].encode(values) }
func decode(datatype string, encoded []byte) []string { return codecs[datatype].decode(encoded) }

func bools(values []string) []bool {
	flags := make([]bool, len(values))
	for place, value := range values {
		flags[place] = value == "true"
	}
	return flags
}

func encodeBools(values []string) []byte {
	encoded := make([]byte, len(values))
	for place, flag := range bools(values) {
		if flag {
			encoded[place] = 1
		}
	}
	return encoded
}

func decodeBools(encoded []byte) []string {
	values := make([]string, len(encoded))
	for place, flag := range encoded {
		values[place] = text(flag == 1)
	}
	return values
}

// Each element of BYTES is its length in four bytes, then its bytes.
func encodeStrings(values []string) []byte {
	var encoded bytes.Buffer
	for _, value := range values {
		encoded.Write(packed([]uint32{uint32(len(value))}))
		encoded.WriteString(value)
	}
	return encoded.Bytes()
}

func decodeStrings(encoded []byte) []string {
	values := []string{}
	for len(encoded) > 0 {
		end := 4 + binary.LittleEndian.Uint32(encoded)
		values = append(values, string(encoded[4:end]))
		encoded = encoded[end:]
	}
	return values
}

func hasContents(datatype string) bool {
	return datatype != "FP16" && datatype != "BF16"
}

func toContents(datatype string, values []string) *pb.InferTensorContents {
	switch datatype {
	case "BOOL":
		return &pb.InferTensorContents{BoolContents: bools(values)}
	case "INT8", "INT16", "INT32":
		return &pb.InferTensorContents{IntContents: parsed[int32](values)}
	case "INT64":
		return &pb.InferTensorContents{Int64Contents: parsed[int64](values)}
	case "UINT8", "UINT16", "UINT32":
		return &pb.InferTensorContents{UintContents: parsed[uint32](values)}
	case "UINT64":
		return &pb.InferTensorContents{Uint64Contents: parsed[uint64](values)}
	case "FP32":
		return &pb.InferTensorContents{Fp32Contents: parsed[float32](values)}
	case "FP64":
		return &pb.InferTensorContents{Fp64Contents: parsed[float64](values)}
	}
	contents := &pb.InferTensorContents{}
	for _, value := range values {
		contents.BytesContents = append(contents.BytesContents, []byte(value))
	}
	return contents
}

func fromContents(datatype string, contents *pb.InferTensorContents) []string {
	switch datatype {
	case "BOOL":
		return printed(contents.BoolContents)
	case "INT8", "INT16", "INT32":
		return printed(contents.IntContents)
	case "INT64":
		return printed(contents.Int64Contents)
	case "UINT8", "UINT16", "UINT32":
		return printed(contents.UintContents)
	case "UINT64":
		return printed(contents.Uint64Contents)
	case "FP32":
		return printed(contents.Fp32Contents)
	case "FP64":
		return printed(contents.Fp64Contents)
	}
	values := []string{}
	for _, value := range contents.BytesContents {
		values = append(values, string(value))
	}
	return values
}
