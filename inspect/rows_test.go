package inspect

import (
	"bytes"
	"encoding/json"
	"io"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	_ "nodeproxy/internal/seed"
	"nodeproxy/plan"
)

// drawRow draws each of its fields: a field that this does not know fails the test.
func drawRow(t *rapid.T, v reflect.Value) {
	for i := range v.NumField() {
		f := v.Field(i)
		if rapid.Bool().Draw(t, "empty") {
			continue
		}
		text := rapid.OneOf(rapid.StringMatching(`[a-z0-9.:-]*`), rapid.String(), rapid.Just("\xff<&>\u2028\\\"\x00\x7f"))
		switch p := f.Addr().Interface().(type) {
		case *time.Time:
			zone := rapid.SampledFrom([]*time.Location{time.UTC, time.Local, time.FixedZone("", 5400)}).Draw(t, "zone")
			*p = time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "seconds"), rapid.Int64Range(0, 1e9-1).Draw(t, "nanoseconds")).In(zone)
		case *[]string:
			*p = rapid.SliceOfN(text, 0, 3).Draw(t, "list")
		case *netip.Addr:
			*p = rapid.SampledFrom([]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}).Draw(t, "address")
		case **Counters:
			*p = new(Counters)
			drawRow(t, reflect.ValueOf(*p).Elem())
		case *uint16:
			*p = rapid.Uint16().Draw(t, "number")
		case *int:
			*p = rapid.Int().Draw(t, "number")
		case *int64:
			*p = rapid.Int64().Draw(t, "number")
		case *string:
			*p = text.Draw(t, "text")
		case *plan.Protocol:
			*p = plan.Protocol(text.Draw(t, "text"))
		default:
			t.Fatalf("there is a field of type %s", f.Type())
		}
	}
}

// TestRowsLikeJSON: rows are written byte for byte as encoding/json writes a list, and read as it reads one, however the text comes in.
func TestRowsLikeJSON(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		rows := make([]ServicePort, rapid.IntRange(0, 4).Draw(t, "rows"))
		for i := range rows {
			drawRow(t, reflect.ValueOf(&rows[i]).Elem())
		}
		var want, got bytes.Buffer
		require.NoError(t, json.NewEncoder(&want).Encode(rows))
		require.NoError(t, writeRows(&got, slices.Values(rows)))
		require.Equal(t, want.String(), got.String())

		again := []ServicePort{}
		require.NoError(t, json.Unmarshal(want.Bytes(), &again))
		text := want.Bytes()
		if rapid.Bool().Draw(t, "indent") {
			var indented bytes.Buffer
			require.NoError(t, json.Indent(&indented, text, " ", "\t"))
			text = indented.Bytes()
		}
		answer := io.Reader(bytes.NewReader(text))
		if rapid.Bool().Draw(t, "in bytes") {
			answer = iotest.OneByteReader(answer)
		}
		read := []ServicePort{}
		for row, err := range readRows(answer) {
			require.NoError(t, err)
			read = append(read, row)
		}
		require.Equal(t, again, read)
	})
}

// TestReadRowsOfOthers: a list by another version is read as well, and one that is cut off or wrong is an error.
func TestReadRowsOfOthers(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`[]`: "", `[{"name":"a"}]`: "a", `[{"name":"a","number":7},{}]`: "a,",
		` [ { "name" : "a" , "more" : { "b" : ["}", "\"]"] } } , {"state":"x","name":"b"} ] `: "a,b",
		`[{"name":"a","number":1,"port":"b","state":"\u00e9"},{"name":"}]"}]`:                 "a,}]",
		"":                              "unexpected EOF",
		"null":                          "unexpected EOF",
		`[{"name":"a"},`:                "a,unexpected EOF",
		`[{"name":"a"},{"name":"b`:      "a,unexpected EOF",
		`[{"name":"a"},{"number":"b"}]`: "a,json: cannot unmarshal string into Go struct field ServicePort.number of type uint16",
		`[{"number":65536}]`:            "json: cannot unmarshal number 65536 into Go struct field ServicePort.number of type uint16",
		`[{"name":}]`:                   "invalid character '}' looking for beginning of value",
	} {
		var got []string
		for row, err := range readRows(strings.NewReader(text)) {
			if err != nil {
				row.Name = err.Error()
			}
			got = append(got, row.Name)
		}
		if strings.Join(got, ",") != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

// pieceCounter counts what is written, and how much at most at once.
type pieceCounter struct{ n, most int }

func (p *pieceCounter) Write(data []byte) (int, error) {
	p.n++
	p.most = max(p.most, len(data))
	return len(data), nil
}

// TestRowsInPieces: a list is sent as it is made, and nothing more is made for a client that has gone.
func TestRowsInPieces(t *testing.T) {
	t.Parallel()
	n, _ := manyServices(t, 1000)
	published(n)
	var p pieceCounter
	require.NoError(t, writeRows(&p, n.servicePorts(plan.Service{})))
	if p.n < 5 || p.most > piece+1000 {
		t.Errorf("%d pieces, of up to %d bytes", p.n, p.most)
	}
	made := 0
	err := writeRows(brokenPipe{}, func(yield func(ServicePort) bool) {
		for row := range n.servicePorts(plan.Service{}) {
			if made++; !yield(row) {
				return
			}
		}
	})
	if err == nil || made > 500 {
		t.Errorf("for nobody, %d rows are made: %v", made, err)
	}
}

// brokenPipe is where nobody reads any more.
type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
