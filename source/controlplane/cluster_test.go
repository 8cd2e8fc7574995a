package controlplane

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"nodeproxy/source"
	"nodeproxy/source/sourcetest"
)

type findings = sourcetest.Findings

const webSelector = sourcetest.WebSelector

var (
	service, names, slice, pod = sourcetest.Service, sourcetest.Services, sourcetest.Slice, sourcetest.Pod
	describe, nameOf           = sourcetest.Describe, sourcetest.Name
	prefixes, same             = sourcetest.Prefixes, sourcetest.Same
)

// load makes a cluster of YAML documents, and returns what it delivers and what is reported.
func load(t *testing.T, manifest string, change ...func(*Ranges)) (source.Batch, findings) {
	t.Helper()
	var f findings
	var r Ranges
	for _, c := range change {
		c(&r)
	}
	batch := newCluster(t, r, &f).Update(objects(t, manifest, &f))
	return batch, f
}

func newCluster(t *testing.T, r Ranges, f *findings) *Cluster {
	t.Helper()
	c, err := New(r, func(_ string, about ID, found []source.Finding) {
		for _, x := range found {
			if x.Object = about.String(); f != nil {
				f.Report(x)
			}
		}
	})
	require.NoError(t, err)
	return c
}

// objects reads YAML documents and admits their objects. What is said of them is added to f.
func objects(t *testing.T, manifest string, f *findings) map[ID]any {
	t.Helper()
	out := map[ID]any{}
	for doc := range strings.SplitSeq(manifest, "---\n") {
		if strings.TrimSpace(doc) == "" {
			continue
		}
		var head struct {
			APIVersion, Kind string
			Metadata         struct{ Namespace, Name string }
		}
		if err := yaml.Unmarshal([]byte(doc), &head); err != nil {
			t.Fatalf("%v:\n%s", err, doc)
		}
		typ := Type{head.Kind, head.APIVersion}
		id, obj := typ.ID(head.Metadata.Namespace, head.Metadata.Name), typ.New()
		if err := yaml.UnmarshalStrict([]byte(doc), obj); err != nil {
			t.Fatalf("%v:\n%s", err, doc)
		}
		found, refused := Admit(obj)
		for _, x := range found {
			if x.Object = id.String(); f != nil {
				f.Report(x)
			}
		}
		if !refused {
			out[id] = obj
		}
	}
	return out
}
