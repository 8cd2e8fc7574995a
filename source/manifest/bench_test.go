package manifest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// The objects of the benchmarks, of about the size that an API server prints them in.
const (
	benchService = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web-%[1]d","namespace":"bench-%[2]d",` +
		`"uid":"4a8381ac-a4b6-477e-a1ed-%012[1]d","resourceVersion":"1655960","creationTimestamp":"2022-09-08T09:55:14Z",` +
		`"labels":{"app.kubernetes.io/name":"web-%[1]d","app.kubernetes.io/part-of":"bench"}},"spec":{"type":"ClusterIP",` +
		`"ports":[{"name":"http","port":80,"protocol":"TCP","targetPort":8080}],"sessionAffinity":"None",` +
		`"internalTrafficPolicy":"Cluster","ipFamilies":["IPv4"],"ipFamilyPolicy":"SingleStack"},"status":{"loadBalancer":{}}}`
	benchSlice = `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"web-%[1]d-abcde",` +
		`"namespace":"bench-%[2]d","labels":{"kubernetes.io/service-name":"web-%[1]d"}},"addressType":"IPv4",` +
		`"ports":[{"name":"http","port":8080,"protocol":"TCP"}],"endpoints":[` +
		`{"addresses":["10.%[3]d.%[4]d.1"],"conditions":{"ready":true,"serving":true,"terminating":false},"nodeName":"node-a","zone":"a"},` +
		`{"addresses":["10.%[3]d.%[4]d.2"],"conditions":{"ready":true,"serving":true,"terminating":false},"nodeName":"node-b","zone":"b"}]}`
)

// benchManifest writes n Services and n EndpointSlices: as a JSON List, as YAML documents, or as a YAML List.
func benchManifest(b *testing.B, n int, format string) []byte {
	var objects [][]byte
	for i := range n {
		objects = append(objects, fmt.Appendf(nil, benchService, i, i%100))
	}
	for i := range n {
		objects = append(objects, fmt.Appendf(nil, benchSlice, i, i%100, i/250, i%250))
	}
	if format == "json" {
		return slices.Concat([]byte(`{"apiVersion":"v1","kind":"List","items":[`), bytes.Join(objects, []byte(",\n")), []byte("]}"))
	}
	for i, text := range objects {
		var err error
		objects[i], err = yaml.JSONToYAML(text)
		require.NoError(b, err)
	}
	if format == "yaml" {
		return bytes.Join(objects, []byte("---\n"))
	}
	out := []byte("apiVersion: v1\nkind: List\nitems:\n")
	for _, text := range objects {
		out = fmt.Appendf(out, "- %s\n", bytes.ReplaceAll(bytes.TrimSpace(text), []byte("\n"), []byte("\n  ")))
	}
	return out
}

func BenchmarkLoad(b *testing.B) {
	for _, format := range []string{"json", "yaml", "yaml-list"} {
		b.Run(format, func(b *testing.B) {
			name := "all.yaml"
			if format == "json" {
				name = "all.json"
			}
			path := filepath.Join(b.TempDir(), name)
			data := benchManifest(b, 10_000, format)
			require.NoError(b, os.WriteFile(path, data, 0o644))
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				batch, err := Load(Config{Path: path})
				if err != nil || len(batch.Services) != 10_000 || len(batch.EndpointSlices) != 10_000 {
					b.Fatal(err, len(batch.Services), len(batch.EndpointSlices))
				}
			}
		})
	}
}

// BenchmarkEdit measures what a change of one endpoint costs in a file of 10,000 Services and slices.
func BenchmarkEdit(b *testing.B) {
	data := benchManifest(b, 10_000, "json")
	_, s, err := Config{Path: "all.json"}.open()
	require.NoError(b, err)
	versions := [2][]byte{data, bytes.Replace(data, []byte("10.20.5.2"), []byte("10.20.5.9"), 1)}
	i := 0
	next := func() int {
		i++
		return len(s.update([]*reading{{path: "all.json", data: versions[i%2]}}, nil).EndpointSlices)
	}
	next()
	for b.Loop() {
		if n := next(); n != 1 {
			b.Fatal(n)
		}
	}
}
