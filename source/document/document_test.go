package document

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestLines holds that a field is found on the same line, whatever way it is written.
func TestLines(t *testing.T) {
	t.Parallel()
	const yaml = "# first\n---\na: 1\nlist:\n- x: 1\n- x: 2\n  dotted.key: 3\n"
	const json = "\n\n{\"a\":1,\n\"list\":[\n{\"x\":1},{\n\"x\":2,\n\"dotted.key\":3}]}"
	for text, want := range map[string]map[string]int{
		yaml: {"": 3, "a": 3, "list": 4, "list[0]": 5, "list[1].x": 6, "list[1].dotted.key": 7, "list[1][dotted.key]": 7, "list[7]": 4, "b.c": 3},
		json: {"": 3, "a": 3, "list": 4, "list[0]": 5, "list[1].x": 6, "list[1].dotted.key": 7, "list[1][dotted.key]": 7, "list[7]": 4, "b.c": 3},
	} {
		docs := Split("f", []byte(text), func(Type) bool { return false })
		if len(docs) != 1 {
			t.Fatalf("%d documents in %q", len(docs), text)
		}
		root, err := docs[0].Parse()
		require.NoError(t, err)
		for field, line := range want {
			if got := Line(root, field); got != line {
				t.Errorf("%q: %q is on line %d, want %d", text, field, got, line)
			}
		}
	}
}

// TestSplit holds what is a document, and that a fault within one leaves those before it alone, and in YAML those behind it.
func TestSplit(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"":                                      nil,
		"# nothing\n---\n...\n%YAML 1.2\n":      nil,
		"a: 1\n---\nb: [\n--- {c: 1}\n":         {"a: 1\n", "---\nb: [\n", "--- {c: 1}\n"},
		"a: |\n  --- no marker\n...\nb: 2":      {"a: |\n  --- no marker\n", "b: 2"},
		"{\"a\":1}\n{\"b\":[1,]} {\"c\":\"}\"}": {`{"a":1}`, `{"b":[1,]} {"c":"}"}`},
		`{"a":1} {"c":"}"}`:                     {`{"a":1}`, `{"c":"}"}`},
		`{"kind":"L","items":[{},{"a":2},1]}`:   {`{}`, `{"a":2}`, `1`},
		`{"kind":"L","other":1,"items":[1]}`:    {`{"kind":"L","other":1,"items":[1]}`},
		"{a: 1}":                                {"{a: 1}"},
	} {
		var got []string
		for _, d := range Split("f", []byte(text), func(t Type) bool { return t.Kind == "L" }) {
			got = append(got, string(d.Text))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// TestDecode holds that each field which can't be read is named, even where a type can't be decoded from null.
func TestDecode(t *testing.T) {
	t.Parallel()
	type inner struct {
		Number int32           `json:"number"`
		Period metav1.Duration `json:"period"`
	}
	type outer struct {
		Text string           `json:"text"`
		List []inner          `json:"list"`
		Map  map[string]inner `json:"map"`
	}
	for text, want := range map[string]string{
		`{"text":"a","list":[{"number":1,"period":"1s"}]}`: "",
		`{"text":1,"list":[{"number":1},{"number":"x","period":"1s"},{"period":5}],"map":{"a.b":{"period":"1x"}}}`: `text: must be a string (quote it), not 1
list[1].number: must be a whole number of 32 bits, not "x"
list[2].period: must be a string (quote it), not 5
map[a.b].period: can't be read: time: unknown unit "x" in duration "1x"`,
		`[]`: ": must be a mapping of fields, not []",
		`{"text":"a","extra":1,"list":[{"nmber":1}],"text":"b"}`: "extra: unknown field\nlist[0].nmber: unknown field\ntext: duplicate field",
		"{\"text\":\n\"a\",}": "line 2: broken JSON: invalid character '}' looking for beginning of object key string",
	} {
		ignored, faults, err := Decode([]byte(text), new(outer))
		var got []string
		if e, ok := errors.AsType[*SyntaxError](err); ok {
			got = append(got, fmt.Sprintf("line %d: %s", e.Line, e.Detail))
		}
		for _, f := range append(ignored, faults...) {
			got = append(got, f.Field+": "+f.Detail)
		}
		if strings.Join(got, "\n") != want {
			t.Errorf("%s:\n%s\nwant:\n%s", text, strings.Join(got, "\n"), want)
		}
	}
}

// TestDeep holds that JSON which nests deeper than any stack is broken, and no more.
func TestDeep(t *testing.T) {
	t.Parallel()
	d := &Document{Name: "f", Text: []byte(strings.Repeat("[", 4<<20)), Line: 1, JSON: true}
	if _, err := d.Parse(); err == nil {
		t.Error("it can be read")
	}
}
