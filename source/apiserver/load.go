package apiserver

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
)

// Load lists everything that a Source would watch, once. An optional resource may be missing; any other failure is an error. Of cfg
// it uses Client and NodeName only.
func Load(ctx context.Context, cfg Config) (source.Batch, error) {
	var out source.Batch
	for _, r := range resources(cfg) {
		list, err := r.list(ctx, metav1.ListOptions{})
		if r.optional && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)) {
			continue
		}
		if err != nil {
			return source.Batch{}, fmt.Errorf("listing %s: %w", r.name, err)
		}
		items, err := meta.ExtractList(list)
		if err != nil {
			return source.Batch{}, fmt.Errorf("listing %s: %w", r.name, err)
		}
		objects := make([]any, len(items))
		for i, item := range items {
			objects[i] = item
		}
		s := &store{resource: r, put: putInto[r.name], versions: map[types.NamespacedName]string{},
			deliver: func(_ *resource, b source.Batch, _ bool) { out.Merge(b) }}
		if err := s.Replace(objects, ""); err != nil {
			return source.Batch{}, err
		}
	}
	out.Synced = true
	return out, nil
}
