package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/rand"
	"reflect"
	"strconv"
	"time"

	"github.com/RichardKnop/machinery/v1/tasks"
)

// typedArg is an argument that is made into a real Go value of its type before Go Machinery writes it.
type typedArg struct {
	Name  string          `json:"name"`
	Type  string          `json:"type"`
	Value json.RawMessage `json:"value"`
}

func typedArgs(given []typedArg) ([]tasks.Arg, error) {
	args := []tasks.Arg{}
	for _, one := range given {
		var loose interface{}
		decoder := json.NewDecoder(bytes.NewReader(one.Value))
		decoder.UseNumber()
		if err := decoder.Decode(&loose); err != nil {
			return nil, err
		}
		value, err := tasks.ReflectValue(one.Type, loose)
		if err != nil {
			return nil, err
		}
		args = append(args, tasks.Arg{Name: one.Name, Type: one.Type, Value: value.Interface()})
	}
	return args, nil
}

// plain is a value as JSON that loses nothing: floats by their shortest digits as text, byte slices as lists of numbers.
func plain(value interface{}) interface{} {
	switch v := value.(type) {
	case float64:
		return floatText(v)
	case float32:
		return floatText(float64(v))
	}
	reflected := reflect.ValueOf(value)
	if reflected.Kind() == reflect.Slice {
		if reflected.IsNil() {
			return nil
		}
		list := make([]interface{}, reflected.Len())
		for i := range list {
			list[i] = plain(reflected.Index(i).Interface())
		}
		return list
	}
	return value
}

func floatText(v float64) string {
	if math.IsInf(v, 0) || math.IsNaN(v) {
		return fmt.Sprint(v)
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}

type decoded struct {
	Error string        `json:"error,omitempty"`
	Args  []interface{} `json:"args"`
	Wire  string        `json:"wire,omitempty"`
}

// decodeAll reads messages as a Go worker does, converts their arguments, and writes them again as Go would.
func decodeAll(messages []json.RawMessage) (interface{}, error) {
	found := make([]decoded, len(messages))
	for i, message := range messages {
		found[i] = decodeOne(message)
	}
	return found, nil
}

func decodeOne(message json.RawMessage) (d decoded) {
	one, err := signature(message)
	if err != nil {
		return decoded{Error: err.Error()}
	}
	for _, arg := range one.Args {
		value, err := tasks.ReflectValue(arg.Type, arg.Value)
		if err != nil {
			return decoded{Error: err.Error()}
		}
		d.Args = append(d.Args, map[string]interface{}{"type": value.Type().String(), "value": plain(value.Interface())})
	}
	wire, err := json.Marshal(one)
	if err != nil {
		return decoded{Error: err.Error()}
	}
	d.Wire = string(wire)
	return d
}

// fuzz makes random signatures that Go can send, each with the values its arguments have in Go.
func fuzz(seed int64, count int) (interface{}, error) {
	random := rand.New(rand.NewSource(seed))
	found := make([]decoded, count)
	for i := range found {
		one := randomSignature(random, 2)
		wire, err := json.Marshal(one)
		if err != nil {
			return nil, err
		}
		found[i] = decoded{Wire: string(wire), Args: []interface{}{}}
		for _, arg := range one.Args {
			value := reflect.ValueOf(arg.Value)
			found[i].Args = append(found[i].Args, map[string]interface{}{
				"type": value.Type().String(), "value": plain(arg.Value),
			})
		}
	}
	return found, nil
}

func randomSignature(random *rand.Rand, depth int) *tasks.Signature {
	one := &tasks.Signature{
		UUID: randomText(random), Name: randomText(random), RoutingKey: randomText(random),
		GroupUUID: randomText(random), GroupTaskCount: random.Intn(5), Priority: uint8(random.Intn(256)),
		Immutable: random.Intn(2) == 0, RetryCount: random.Intn(10), RetryTimeout: random.Intn(100),
		IgnoreWhenTaskNotRegistered: random.Intn(2) == 0, StopTaskDeletionOnError: random.Intn(2) == 0,
	}
	if random.Intn(3) == 0 {
		eta := time.Unix(random.Int63n(4e9), random.Int63n(1e9)).In(time.FixedZone("", 60*(random.Intn(1440)-720)))
		one.ETA = &eta
	}
	if random.Intn(2) == 0 {
		one.Headers = tasks.Headers{}
		for i := random.Intn(3); i > 0; i-- {
			one.Headers[randomText(random)] = randomText(random)
		}
	}
	for i := random.Intn(5); i > 0; i-- {
		one.Args = append(one.Args, randomArg(random))
	}
	if depth > 0 {
		for i := random.Intn(2); i > 0; i-- {
			one.OnSuccess = append(one.OnSuccess, randomSignature(random, depth-1))
		}
		for i := random.Intn(2); i > 0; i-- {
			one.OnError = append(one.OnError, randomSignature(random, depth-1))
		}
		if random.Intn(4) == 0 {
			one.ChordCallback = randomSignature(random, depth-1)
		}
	}
	return one
}

var scalars = []interface{}{
	false, "", int(0), int8(0), int16(0), int32(0), int64(0), uint(0), uint8(0), uint16(0), uint32(0), uint64(0),
	float32(0), float64(0),
}

func randomArg(random *rand.Rand) tasks.Arg {
	kind := reflect.TypeOf(scalars[random.Intn(len(scalars))])
	if random.Intn(2) == 0 {
		value := randomScalar(random, kind)
		return tasks.Arg{Name: randomText(random), Type: kind.String(), Value: value.Interface()}
	}
	slice := reflect.Zero(reflect.SliceOf(kind)) // null, now and then
	for i := random.Intn(4); i > 0; i-- {
		slice = reflect.Append(slice, randomScalar(random, kind))
	}
	return tasks.Arg{Type: slice.Type().String(), Value: slice.Interface()}
}

func randomScalar(random *rand.Rand, kind reflect.Type) reflect.Value {
	value := reflect.New(kind).Elem()
	switch kind.Kind() {
	case reflect.Bool:
		value.SetBool(random.Intn(2) == 0)
	case reflect.String:
		value.SetString(randomText(random))
	case reflect.Float32:
		value.SetFloat(float64(float32(randomFloat(random))))
	case reflect.Float64:
		value.SetFloat(randomFloat(random))
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		bits := kind.Bits()
		value.SetInt(int64(random.Uint64()) >> (64 - bits) >> random.Intn(bits))
	default:
		bits := kind.Bits()
		value.SetUint(random.Uint64() >> (64 - bits) >> random.Intn(bits))
	}
	return value
}

func randomFloat(random *rand.Rand) float64 {
	switch random.Intn(4) {
	case 0:
		return float64(random.Intn(2001) - 1000)
	case 1:
		return random.NormFloat64()
	case 2:
		return random.NormFloat64() * math.Pow(10, float64(random.Intn(60)-30))
	}
	return 0
}

// Letters that need care somewhere: quotes, HTML, line separators, other planes, control characters.
var letters = []rune("abcXYZ019 _-.:/\\\"'<>&\n\t\x00\x1f\u00e9\u00df\u4e2d\u2028\u2029\ufeff\U0001f600\U0010ffff")

func randomText(random *rand.Rand) string {
	text := make([]rune, random.Intn(6))
	for i := range text {
		text[i] = letters[random.Intn(len(letters))]
	}
	return string(text)
}
