package manifest

import (
	"cmp"
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

	mu          sync.Mutex                    // for readers in other goroutines
	definitions map[controlplane.ID][]*object // of each object, in order: the first is in force
}

// Pods returns the Pods in force, in no order. They must not be changed.
func (s *store) Pods() (out []*v1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, list := range s.definitions {
		if pod, is := list[0].obj.(*v1.Pod); is {
			out = append(out, pod)
		}
	}
	return out
}

// Findings returns what is wrong with the manifests now, and what else their owners should know, without lines.
func (s *store) Findings() []source.Finding { return s.findings.all() }

// ServiceFile returns the file that has a Service; "" if none has.
func (s *store) ServiceFile(namespace, name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if list := s.definitions[controlplane.ID{Kind: "Service", Namespace: namespace, Name: name}]; len(list) > 0 {
		return list[0].doc.Name
	}
	return ""
}

func newStore(cfg *Config) (*store, error) {
	s := &store{
		findings:    reporter{report: cfg.Report, current: map[string][]source.Finding{}},
		files:       map[string]*file{},
		others:      map[string]bool{},
		definitions: map[controlplane.ID][]*object{},
	}
	var err error
	s.cluster, err = controlplane.New(cfg.Ranges, s.located)
	return s, err
}

// located adds an object and its place to what the cluster reports.
func (s *store) located(topic string, about controlplane.ID, found []source.Finding) {
	out := make([]remark, len(found))
	for i, f := range found {
		f.Object = about.String()
		out[i] = remark{Finding: f}
		if list := s.definitions[about]; len(list) > 0 {
			out[i].object = list[0]
		}
	}
	s.findings.set(topic, out)
}

// update puts new versions of files in force and drops the files that are gone. It returns the batch to deliver.
func (s *store) update(readings []*reading, gone []string) source.Batch {
	decodeAll(readings, s.files)
	objects := map[controlplane.ID]any{}
	for id := range s.replaceFiles(readings, gone) {
		objects[id] = nil
		list := s.definitions[id]
		if len(list) > 0 {
			objects[id] = list[0].obj
		}
		s.reportDuplicates(id, list)
	}
	batch := s.cluster.Update(objects)
	s.findings.flush()
	return batch
}

// replaceFiles replaces the definitions in files, and returns those objects that may have changed.
func (s *store) replaceFiles(readings []*reading, gone []string) map[controlplane.ID]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := map[controlplane.ID]bool{}
	replace := func(before, after []*object) {
		gone := map[*object]bool{}
		for _, o := range before {
			gone[o] = true
		}
		for _, o := range after {
			if o.obj != nil && !gone[o] {
				s.definitions[o.id] = append(s.definitions[o.id], o)
				touched[o.id] = true
			} else if len(s.definitions[o.id]) > 1 { // Their order may be another.
				touched[o.id] = true
			}
			delete(gone, o)
		}
		for o := range gone {
			s.definitions[o.id] = slices.DeleteFunc(s.definitions[o.id], func(other *object) bool { return other == o })
			touched[o.id] = true
		}
	}
	for _, r := range readings {
		f := s.files[r.path]
		if f == nil {
			f = &file{path: r.path}
			s.files[r.path] = f
		}
		before := f.objects
		s.findings.set("file "+r.path, s.withoutOthers(f.put(r)))
		replace(before, f.objects)
	}
	for _, path := range gone {
		if f := s.files[path]; f != nil {
			replace(f.objects, nil)
			s.findings.set("file "+path, nil)
			delete(s.files, path)
		}
	}
	for id := range touched {
		if len(s.definitions[id]) == 0 {
			delete(s.definitions, id)
		}
		slices.SortFunc(s.definitions[id], func(a, b *object) int {
			return cmp.Or(cmp.Compare(a.doc.Name, b.doc.Name), cmp.Compare(a.order, b.order))
		})
	}
	return touched
}

func (s *store) reportDuplicates(id controlplane.ID, list []*object) {
	var remarks []remark
	for i := 1; i < len(list); i++ {
		first := remark{object: list[0], Finding: source.Finding{Field: "metadata.name"}}
		remarks = append(remarks, remark{object: list[i], Finding: source.Finding{
			Severity: source.Problem, Object: id.String(), Field: "metadata.name",
			Detail:  "the same object is defined at " + first.located(&lineFinder{}).Where,
			Effect:  "that one is used, as it comes first by file name and line; this one is left out",
			LeftOut: true,
		}})
	}
	s.findings.set("duplicate "+id.String(), remarks)
}

// withoutOthers reports the first object of each type that is not used, once, and returns the remarks about all others.
func (s *store) withoutOthers(remarks []remark) []remark {
	var out []remark
	for _, rem := range remarks {
		switch o := rem.object; {
		case o == nil || o.other == "":
			out = append(out, rem)
		case !s.others[o.other]:
			s.others[o.other] = true
			s.findings.set("kind "+o.other, []remark{rem})
		}
	}
	return out
}
