package apiserver

import (
	"context"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// mostPods bounds how many Pods of a namespace are listed.
const mostPods = 5000

// Pods lists the Pods of a namespace, 5,000 at most. A proxy needs none: this is for a person who asks why a Service has no endpoints,
// and whose credentials are in use.
func (c *Client) Pods(ctx context.Context, namespace string) ([]*v1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var list v1.PodList
	err := c.core.Get().Namespace(namespace).Resource("pods").
		VersionedParams(&metav1.ListOptions{Limit: mostPods}, parameters).Do(ctx).Into(&list)
	if err != nil {
		return nil, err
	}
	out := make([]*v1.Pod, len(list.Items))
	for i := range list.Items {
		out[i] = &list.Items[i]
	}
	return out, nil
}
