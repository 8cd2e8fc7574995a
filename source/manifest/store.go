package manifest

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/source"
	"nodeproxy/source/controlplane"
)

// store holds the objects of the files, and the definition of each that is in force.
type store struct {
	cluster  *controlplane.Cluster
	findings reporter
	files    map[string]*file
	others   map[string]bool // types that have been reported as not proxied

	mu          sync.Mutex                   // for readers in other goroutines
	definitions map[controlplane.ID][]*entry // of each object, in order: the first is in force
	pods        map[controlplane.ID]*v1.Pod  // those of definitions that are in force
}

// allPods returns the Pods in force, in no order. It may be called at any time.
func (s *store) allPods() []*v1.Pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.pods))
}

// serviceFile returns the file that has a Service; "" if none has. It may be called at any time.
func (s *store) serviceFile(namespace, name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if list := s.definitions[controlplane.ID{Kind: "Service", Namespace: namespace, Name: name}]; len(list) > 0 {
		return list[0].doc.Name
	}
	return ""
}

func (s *store) notePods(objects map[controlplane.ID]any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, obj := range objects {
		if pod, is := obj.(*v1.Pod); is {
			s.pods[id] = pod
		} else {
			delete(s.pods, id)
		}
	}
}

func newStore(cfg *Config) (*store, error) {
	s := &store{
		findings:    reporter{report: cfg.Report, current: map[string][]source.Finding{}},
		files:       map[string]*file{},
		others:      map[string]bool{},
		definitions: map[controlplane.ID][]*entry{},
		pods:        map[controlplane.ID]*v1.Pod{},
	}
	var err error
	s.cluster, err = controlplane.New(cfg.Ranges, s.located)
	return s, err
}

// located adds the places of the objects to what the cluster reports.
func (s *store) located(topic string, remarks []controlplane.Remark) {
	var out []remark
	for _, r := range remarks {
		r.Object = r.ID.String()
		rem := remark{issue: issue{Finding: r.Finding}}
		if list := s.definitions[r.ID]; len(list) > 0 {
			rem.entry = list[0]
		}
		out = append(out, rem)
	}
	s.findings.set(topic, out)
}

// update puts new versions of files in force and drops the files that are gone. It returns the batch to deliver.
func (s *store) update(readings []*reading, gone []string) source.Batch {
	decodeAll(readings, s.files)
	touched := map[controlplane.ID]bool{}
	for _, r := range readings {
		f := s.files[r.path]
		if f == nil {
			f = &file{path: r.path}
			s.files[r.path] = f
		}
		before := f.entries
		remarks := f.put(r)
		s.replaceEntries(before, f.entries, touched)
		s.findings.set("file "+r.path, s.withoutOthers(remarks))
	}
	for _, path := range gone {
		if f := s.files[path]; f != nil {
			s.replaceEntries(f.entries, nil, touched)
			s.findings.set("file "+path, nil)
			delete(s.files, path)
		}
	}
	objects := make(map[controlplane.ID]any, len(touched))
	for id := range touched {
		objects[id] = nil
		list := s.definitions[id]
		s.mu.Lock()
		slices.SortStableFunc(list, compareEntries)
		s.mu.Unlock()
		if len(list) > 0 {
			objects[id] = list[0].obj
		}
		s.reportDuplicates(id, list)
	}
	s.notePods(objects)
	batch := s.cluster.Update(objects)
	s.findings.flush()
	return batch
}

func (s *store) reportDuplicates(id controlplane.ID, list []*entry) {
	var remarks []remark
	for i := 1; i < len(list); i++ {
		var lines lineFinder
		first := remark{issue: issue{Finding: source.Finding{Field: "metadata.name"}}, entry: list[0]}
		where := fmt.Sprintf("%s:%d", list[0].doc.Name, lines.find(&first))
		remarks = append(remarks, remark{entry: list[i], issue: issue{Finding: source.Finding{
			Severity: source.Problem, Object: id.String(), Field: "metadata.name", Detail: "the same object is defined at " + where,
			Effect:  "that one is used, as it comes first by file name and line; this one is left out",
			LeftOut: true,
		}}})
	}
	s.findings.set("duplicate "+id.String(), remarks)
}

// withoutOthers reports the first object of each type that is not used, once, and returns the remarks about all others.
func (s *store) withoutOthers(remarks []remark) []remark {
	var out []remark
	for _, rem := range remarks {
		switch e := rem.entry; {
		case e == nil || e.other == "":
			out = append(out, rem)
		case !s.others[e.other]:
			s.others[e.other] = true
			s.findings.set("kind "+e.other, []remark{rem})
		}
	}
	return out
}

// replaceEntries adds and removes the definitions that differ between two versions of a file.
func (s *store) replaceEntries(before, after []*entry, touched map[controlplane.ID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	had, has := map[*entry]bool{}, map[*entry]bool{}
	for _, e := range before {
		had[e] = true
	}
	for _, e := range after {
		has[e] = true
		if e.obj != nil && !had[e] {
			s.definitions[e.id] = append(s.definitions[e.id], e)
		}
		// The place of one of several may have changed.
		if e.obj != nil && (!had[e] || len(s.definitions[e.id]) > 1) {
			touched[e.id] = true
		}
	}
	for _, e := range before {
		if e.obj != nil && !has[e] {
			touched[e.id] = true
			s.definitions[e.id] = slices.DeleteFunc(s.definitions[e.id], func(o *entry) bool { return o == e })
			if len(s.definitions[e.id]) == 0 {
				delete(s.definitions, e.id)
			}
		}
	}
}

// compareEntries orders entries of one object: by file name, then by place.
func compareEntries(a, b *entry) int {
	return cmp.Or(cmp.Compare(a.doc.Name, b.doc.Name), cmp.Compare(a.order, b.order))
}
